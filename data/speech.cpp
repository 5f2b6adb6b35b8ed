// Recordings of speech with their transcripts: train.tsv and test.tsv in data.root, a line per recording: its
// path relative to data.root, a tab, what is said. Spectrograms are made on demand.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <sstream>
#include <utility>

#include "data/dataset.h"
#include "data/speech.h"
#include "nn/base/check.h"
#include "nn/base/checksum.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

template <class Sequence>
std::int64_t edit_distance(const Sequence& a, const Sequence& b) {
  std::vector<std::int64_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<std::int64_t>(j);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::int64_t diagonal = std::exchange(row[0], static_cast<std::int64_t>(i) + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::int64_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::vector<std::string> words_of(std::string_view text) {
  std::istringstream in{std::string(text)};
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

class Speech final : public Dataset {
 public:
  Speech(const DatasetOptions& options, Split split) {
    const std::string file = split == Split::train ? "train.tsv" : "test.tsv";
    const std::string folder = find_data_folder("an4", options.root, {}, {file});
    read(folder, find_data_file("an4", folder, {file}), options.get<int>(option::max_bad_files));
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
  int left_out() const override { return static_cast<int>(left_out_.size()); }
  std::vector<std::string> warnings() const override { return left_out_; }
  void get_frames(std::int64_t index, float* out, std::int64_t stride) const override {
    const std::vector<float> samples = read_recording(at(index).path);
    if (static_cast<std::int64_t>(samples.size()) != at(index).samples)
      throw UserError(fmt::format("recording '{}': it has changed since the run began", at(index).path));
    log_spectrogram(samples, out, stride);
  }
  // All lengths and transcripts, and a few files' bytes: spectrograms' last bits differ between machines.
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
  std::uint64_t class_names_checksum() const override {
    Checksum checksum;
    checksum.update(std::as_bytes(std::span(kAlphabet)));
    return checksum.value();
  }

 private:
  struct Utterance {
    std::string path;
    std::int64_t samples;
    std::vector<std::int32_t> labels;
  };

  const Utterance& at(std::int64_t index) const { return utterances_[static_cast<std::size_t>(index)]; }

  void read(const std::string& folder, const std::string& manifest, int max_bad_files) {
    const std::string content = read_text(manifest);
    std::string_view rest = content;
    std::int64_t number = 0;
    for (std::string_view line; next_line(rest, line);) {
      ++number;
      if (line.empty()) continue;
      const std::string place = fmt::format("{}:{}: ", manifest, number);
      const std::size_t tab = line.find('\t');
      if (tab == line.npos)
        throw UserError(place + "a line has the path of a recording, a tab, and what is said");
      Utterance utterance{(std::filesystem::path(folder) / line.substr(0, tab)).string(), 0, {}};
      try {
        utterance.labels = encode_transcript(line.substr(tab + 1));
      } catch (const UserError& error) {
        throw UserError(place + error.what());
      }
      if (utterance.labels.empty()) throw UserError(place + "an empty transcript");
      try {
        utterance.samples = recording_samples(utterance.path);
        if (utterance.samples < kWindow)
          throw UserError(fmt::format("recording '{}': {} samples are shorter than a window of {}",
                                      utterance.path, utterance.samples, kWindow));
      } catch (const OutOfMemory&) {
        throw;
      } catch (const UserError& error) {
        const std::int64_t count = left_out() + 1;
        left_out_.push_back(damaged_note(place + error.what(), "it is left out", count, max_bad_files));
        continue;
      }
      utterances_.push_back(std::move(utterance));
    }
    if (utterances_.empty())
      throw UserError(fmt::format("'{}' names no recording that can be read", manifest));
  }

  std::string name_ = "speech";
  std::vector<Utterance> utterances_;
  std::vector<std::string> left_out_;  // a warning each
};

const bool speech_registered = add_dataset<Speech>(
    "speech", "recordings with transcripts: train.tsv and test.tsv in data.root", {option::max_bad_files});

}  // namespace

std::vector<std::int32_t> encode_transcript(std::string_view text) {
  std::vector<std::int32_t> labels;
  const auto blank = static_cast<std::int32_t>(kAlphabet.find(' '));
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    const char capital = static_cast<char>(std::toupper(code));
    const bool space = std::isspace(code) != 0;
    const std::size_t label = kAlphabet.find(capital, 1);
    if (!space && label == std::string_view::npos)
      throw UserError(
          fmt::format("a transcript has letters, apostrophes and blanks, and not {}",
                      std::isprint(code) ? fmt::format("'{}'", c) : fmt::format("byte {}", code)));
    if (!space)
      labels.push_back(static_cast<std::int32_t>(label));
    else if (!labels.empty() && labels.back() != blank)
      labels.push_back(blank);
  }
  if (!labels.empty() && labels.back() == blank) labels.pop_back();
  return labels;
}

std::string decode_transcript(std::span<const std::int32_t> labels) {
  std::string text;
  for (const std::int32_t label : labels) text += kAlphabet[static_cast<std::size_t>(label)];
  return text;
}

std::vector<std::int32_t> collapse_path(std::span<const std::int32_t> classes) {
  std::vector<std::int32_t> labels;
  for (std::size_t t = 0; t < classes.size(); ++t)
    if (classes[t] != 0 && (t == 0 || classes[t] != classes[t - 1])) labels.push_back(classes[t]);
  return labels;
}

TranscriptErrors transcript_errors(std::string_view recognised, std::string_view truth) {
  const auto joined = [](const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += word;
    return text;
  };
  const auto heard = words_of(recognised), said = words_of(truth);
  return {edit_distance(heard, said), static_cast<std::int64_t>(said.size()),
          edit_distance(joined(heard), joined(said)), static_cast<std::int64_t>(joined(said).size())};
}

}  // namespace topknot
