// Recordings of speech with their transcripts: train.tsv and test.tsv in data.root, a line per recording: its path relative
// to data.root, a tab, what is said. The spectrogram of a recording is made when it is asked for.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "data/dataset.h"
#include "data/recording.h"
#include "data/spectrogram.h"
#include "data/transcript.h"
#include "nn/core/base/checksum.h"

namespace topknot {
namespace {

class Speech final : public Dataset {
 public:
  Speech(const DatasetOptions& options, Split split) {
    const std::string file = split == Split::train ? "train.tsv" : "test.tsv";
    const std::string folder = find_data_folder("an4", options.root, {}, {file});
    read(folder, find_data_file("an4", folder, {file}));
    // The shortest first; those of one length in the manifest's order.
    std::stable_sort(utterances_.begin(), utterances_.end(),
                     [](const Utterance& a, const Utterance& b) { return a.samples < b.samples; });
    utterances_.resize(static_cast<std::size_t>(
        limited_size(options, split, static_cast<std::int64_t>(utterances_.size()))));
  }

  const std::string& name() const override { return name_; }
  Task task() const override { return Task::transcription; }
  std::int64_t size() const override { return static_cast<std::int64_t>(utterances_.size()); }
  Shape sample_shape() const override { return {1, kSpectrumBins, frames(size() / 2)}; }
  int classes() const override { return static_cast<int>(kAlphabet.size()); }
  std::int64_t frames(std::int64_t index) const override { return spectrogram_frames(at(index).samples); }
  std::span<const std::int32_t> transcript(std::int64_t index) const override { return at(index).labels; }
  std::string where(std::int64_t index) const override { return at(index).path; }
  void get_frames(std::int64_t index, float* out, std::int64_t stride) const override {
    const std::vector<float> samples = read_recording(at(index).path);
    if (static_cast<std::int64_t>(samples.size()) != at(index).samples)
      throw UserError(fmt::format("recording '{}' has changed since the run began", at(index).path));
    log_spectrogram(samples, out, stride);
  }
  // All lengths and transcripts, and the bytes of a few files, since spectrograms differ in the last bits between machines.
  bool add_to(Checksum& checksum) const override {
    constexpr std::size_t kFiles = 16;
    const std::size_t step = utterances_.size() / kFiles + 1;
    for (std::size_t i = 0; i < utterances_.size(); ++i) {
      const Utterance& utterance = utterances_[i];
      checksum.update(std::as_bytes(std::span(&utterance.samples, 1)));
      checksum.update(std::as_bytes(std::span(utterance.labels)));
      if (i % step != 0) continue;
      const std::vector<std::uint8_t> bytes = read_file(utterance.path);
      checksum.update(std::as_bytes(std::span(bytes)));
    }
    return true;
  }

 private:
  struct Utterance {
    std::string path;
    std::int64_t samples;
    std::vector<std::int32_t> labels;
  };

  const Utterance& at(std::int64_t index) const { return utterances_[static_cast<std::size_t>(index)]; }

  void read(const std::string& folder, const std::string& manifest) {
    const std::vector<std::uint8_t> content = read_file(manifest);
    std::istringstream in(std::string(content.begin(), content.end()));
    std::int64_t number = 0;
    for (std::string line; std::getline(in, line);) {
      ++number;
      if (line.empty()) continue;
      try {
        const std::size_t tab = line.find('\t');
        if (tab == std::string::npos)
          throw UserError("a line has the path of a recording, a tab, and what is said");
        const std::string path = (std::filesystem::path(folder) / line.substr(0, tab)).string();
        const std::int64_t samples = recording_samples(path);
        if (samples < kWindow)
          throw UserError(fmt::format("recording '{}': {} samples are shorter than a window of {}", path,
                                      samples, kWindow));
        utterances_.push_back({path, samples, encode_transcript(line.substr(tab + 1))});
        if (utterances_.back().labels.empty()) throw UserError("an empty transcript");
      } catch (const UserError& error) {
        throw UserError(fmt::format("{}:{}: {}", manifest, number, error.what()));
      }
    }
    if (utterances_.empty()) throw UserError(fmt::format("'{}' names no recording", manifest));
  }

  std::string name_ = "speech";
  std::vector<Utterance> utterances_;
};

const RegisterDataset speech_registered("speech",
                                        "recordings with transcripts: train.tsv and test.tsv in data.root",
                                        [](const DatasetOptions& options, Split split) {
                                          return std::unique_ptr<Dataset>(new Speech(options, split));
                                        });

}  // namespace
}  // namespace topknot
