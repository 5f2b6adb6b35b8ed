#pragma once
// A set of samples: pictures with a class, or vectors with target values, in memory or read when they are
// asked for. Immutable once made: any number of threads may read it, and a process' ranks share one.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nn/base/registry.h"
#include "nn/core/tensor.h"

namespace topknot {

// Evaluations read `test`; a text keeps its test file, `held_out`, for the end of a run.
enum class Split { train, test, held_out };

enum class Task {
  classification,  // a label per sample
  regression,      // targets() values per sample
  language_model,  // the next token after each one of a stream; a sample is a window of it
  transcription,  // a label sequence for a recording of any length; sample i + 1 is not shorter than sample i
};

// The keys `data.*` of all sets. A set declares those of its own where it is registered.
struct DatasetOptions : OptionValues {
  DatasetOptions() : OptionValues("data") {}
  std::string root;             // folder of the files; synthetic sets need none
  std::uint64_t seed = 1;       // synthetic sets: which world is drawn. Train and test differ under one seed
  std::int64_t train_size = 0;  // samples; 0: all of them, or the synthetic set's own default
  std::int64_t test_size = 0;   // as train_size, for the test split
  std::int64_t features = 64;   // synthetic_regression: inputs of a sample
  std::int64_t targets = 1;     // synthetic_regression: outputs of a sample
  // Language models: what vocabulary() gave, to encode and decode without files; such a set has no samples.
  std::optional<std::string> stored_vocabulary;
};

// Options that several files declare or read.
namespace option {
inline const Option image_size{"image_size", 0,
                               "height and width of synthetic_images (8 or more) and of image_folder's "
                               "samples, in pixels; 0: 32 and 224",
                               0, 512},
    noise{"noise", std::optional<double>(),
          "noise of synthetic data, as a standard deviation; auto: the data set's own", 0, 1},
    sequence_length{"sequence_length", 35,
                    "tokens of a step in each row of the batch, through which gradients go back", 1, 1e5},
    max_bad_files{"max_bad_files", 0,
                  "damaged files that a rank passes over: the next picture of the class stands in; a "
                  "recording is left out, or one of nearly its length stands in; one more ends the run",
                  0, 1e9};
// data.windows, "columns" or "random": a function, because nvcc cannot read a constant with choices.
Option windows();
}  // namespace option

class Checksum;
class CounterRng;

// A file of a set on demand that could not be used.
struct DamagedFile {
  std::int64_t file = 0;  // its number in the set
  std::string what;       // "picture 'PATH': REASON"
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  Dataset() = default;
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;

  virtual const std::string& name() const = 0;
  virtual Task task() const { return classes() > 0 ? Task::classification : Task::regression; }
  // Samples. Of a stream: the windows that a token can begin; sample i begins with token i.
  virtual std::int64_t size() const = 0;
  // {C, H, W}; vectors {features, 1, 1}, windows {tokens, 1, 1}; {1, bins, frames} of the median recording.
  virtual Shape sample_shape() const = 0;
  virtual int classes() const = 0;  // labels are 0 .. classes-1; 0 means regression
  // Labels per sample. A window that begins with token i has label(i), label(i + 1), ...: the token after
  // each. It may reach beyond the end of the stream, where get() gives 0 and label() kNoLabel.
  std::int64_t labels_per_sample() const { return task() == Task::language_model ? sample_shape()[0] : 1; }
  virtual std::int64_t targets() const { return 0; }  // values per sample, regression only

  // Sample `index` in C, H, W order, sample_shape().numel() floats, not yet normalised; pictures are in [0,
  // 1], tokens are whole numbers.
  // The default uses bytes(): value / 255.
  virtual void get(std::int64_t index, float* sample) const;
  // The same picture as bytes 0 .. 255, for the loader's fast path; null if samples are not bytes.
  virtual const std::uint8_t* bytes(std::int64_t /*index*/) const { return nullptr; }

  // Whether samples are decoded when they are asked for, as bytes, with a random crop of their own. get()
  // then gives them without one, and throws UserError if the file is damaged.
  virtual bool on_demand() const { return false; }
  // On demand: sample `index` as sample_shape().numel() bytes in C, H, W order. `random`: this sample's
  // numbers for crop and mirror image; null: without. A damaged file is added to `damaged`, and the class's
  // next file that can be read, cyclically, stands in: the same on every rank.
  virtual void decode(std::int64_t /*index*/, const CounterRng* /*random*/, std::uint8_t* /*pixels*/,
                      std::vector<DamagedFile>& /*damaged*/) const {
    throw Error("data set '" + name() + "' is in memory");
  }
  // If reading all samples costs too much: adds what tells this set from another, and returns true.
  virtual bool add_to(Checksum&) const { return false; }
  // Checksum of the classes' names in order: a text's vocabulary, an alphabet, folders. 0: there are none.
  virtual std::uint64_t class_names_checksum() const { return 0; }

  // The class, or the token after token `index`; Error for regression.
  virtual std::int32_t label(std::int64_t) const { throw Error("data set '" + name() + "' has no labels"); }
  // label(index), label(index + 1), ...: those of a window.
  virtual void window_labels(std::int64_t index, std::span<std::int32_t> labels) const {
    for (std::int32_t& label : labels) label = this->label(index++);
  }
  // Writes targets() floats. Regression only, else Error.
  virtual void target(std::int64_t, float*) const { throw Error("data set '" + name() + "' has no targets"); }

  // Transcription only, else Error: how many frames a recording has, what is said in it, and its spectrogram:
  // bin k of frame t is out[k * stride + t]; UserError if the file is damaged. `where` names it.
  virtual std::int64_t frames(std::int64_t) const {
    throw Error("data set '" + name() + "' has no recordings");
  }
  virtual std::span<const std::int32_t> transcript(std::int64_t index) const {
    frames(index);
    return {};
  }
  virtual void get_frames(std::int64_t index, float* /*out*/, std::int64_t /*stride*/) const {
    frames(index);
  }
  virtual std::string where(std::int64_t index) const { return "sample " + std::to_string(index); }

  // Language models only: the tokens of a text, and what a token stands for, as it is written before the next
  // one (a word with a blank after it). By default, of a set that knows no texts, both are numbers between
  // blanks. UserError: what the vocabulary does not have.
  virtual std::vector<std::int32_t> encode(const std::string& text) const;
  virtual std::string token_text(std::int32_t token) const { return std::to_string(token) + " "; }
  // The text for DatasetOptions::stored_vocabulary, in UTF-8.
  virtual std::string vocabulary() const { return ""; }
  // Language models only. The kind of token: "word", "character", "byte", or "token" if not known.
  virtual const std::string& token_name() const {
    static const std::string kName = "token";
    return kName;
  }
  // The mean bytes of text of this split's tokens; 0 if unknown, or if tokens, as words, do not tell all.
  virtual double bytes_per_token() const { return 0; }
  // Whether the set has a third split, Split::held_out.
  virtual bool has_held_out() const { return false; }

  // Whether the samples stay in files and take no memory of the process.
  virtual bool on_disk() const { return false; }
  // Damaged files that were left out when the set was made.
  virtual int left_out() const { return 0; }
  // Warnings for the start of a run: files that are there and not read.
  virtual std::vector<std::string> warnings() const { return {}; }

  // A channel's mean and standard deviation over the training split, on the scale of get(): the loader gives
  // (x - mean) / std. Empty means that the samples are used as they are.
  virtual std::vector<float> channel_mean() const { return {}; }
  virtual std::vector<float> channel_std() const { return {}; }
  // Whether random crops and mirror images are still pictures of the same class (`data.augment: auto`).
  virtual bool augment_helps() const { return false; }
};

using DatasetFactory = std::unique_ptr<Dataset> (*)(const DatasetOptions&, Split);

// One file per data set, registered by name. UserError: missing, damaged or mislabelled files, bad options.
Registry<DatasetFactory>& datasets();

// A Set is made of options and a split; it has the options of its own that it declares here.
template <class Set>
bool add_dataset(const std::string& name, const std::string& help, std::vector<Option> own = {}) {
  return datasets().add(name, help, make_as<Dataset, Set>, std::move(own));
}

std::unique_ptr<Dataset> make_dataset(const std::string& name, const DatasetOptions& options, Split split);

// A 64-bit hash of the samples, in their order, and of all labels or targets. Of more than `most_bytes` of
// samples, about so many, evenly spaced; 256 MB take 0.1 s. If a set has it, Dataset::add_to().
std::uint64_t data_checksum(const Dataset& data, std::int64_t most_bytes = 256'000'000);

// How many of a file's `available` samples to use: `wanted` = 0: all; UserError, with the key, if too many.
std::int64_t limited_size(const DatasetOptions& options, Split split, std::int64_t available);

// The warning of a damaged file, number `count` of a split: `what` names it and the reason, `instead` says
// what happens. UserError if it is one more than data.max_bad_files.
std::string damaged_note(const std::string& what, const std::string& instead, std::int64_t count,
                         int max_bad_files);

// For sets that are made, not read: UserError, naming the key, if the samples do not fit in memory.
void check_fits(Split split, std::int64_t samples, std::int64_t bytes_per_sample);

// Finding and reading the files of a data set, with messages that name the file and the way to get it.

// The folder among root and root/sub (each of `subs`) that holds one of `names`. Throws UserError if root
// is empty or none does: it names the files looked for and `scripts/fetch-data DATASET --to DIR`.
std::string find_data_folder(const std::string& dataset, const std::string& root,
                             const std::vector<std::string>& subs, const std::vector<std::string>& names);

// The first of `names` that is a file in `folder`, as a path; UserError as above where none is.
std::string find_data_file(const std::string& dataset, const std::string& folder,
                           const std::vector<std::string>& names);

// The whole file. UserError if it cannot be read.
std::vector<std::uint8_t> read_file(const std::string& path);

// The whole text file, without UTF-8's byte order mark. Bytes that are no UTF-8 pass, as those of Latin-1.
// UserError if it cannot be read, or holds a byte 0, as binary files and UTF-16 do.
std::string read_text(const std::string& path);

// The whole content of a gzip file. UserError if it cannot be read, is no gzip file, is cut short, fails its
// checksum, or unpacks to more than 1 GB. `hint` ends the message: what to do.
std::vector<std::uint8_t> read_gzip(const std::string& path, const std::string& hint);

// "; `scripts/fetch-data mnist --to DIR` brings a good copy"
std::string fetch_hint(const std::string& dataset, const std::string& folder);

}  // namespace topknot
