// Text by words, as the Penn Treebank's language-model files have it (Mikolov et al., "Recurrent neural
// network based language model", 2010): ptb.train.txt, ptb.valid.txt and ptb.test.txt, or train.txt and so
// on, words separated by blanks. Each line ends with the word <eos>. The vocabulary is the training file's
// words, in the order in which they first occur, after <eos> and <unk>; other words of the other files are
// <unk>.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "data/dataset.h"
#include "nn/base/checksum.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

constexpr std::size_t kMostWords = 1 << 24;  // all ids below are exact in a float
constexpr std::int32_t kEndOfLine = 0, kUnknown = 1;

struct TextFile {
  std::string path, content;
};

TextFile read_split(const DatasetOptions& options, const std::string& split) {
  const std::string plain = split + ".txt", ptb = "ptb." + plain;
  const std::string folder = find_data_folder("ptb", options.root, {"ptb", "data", "simple-examples/data"},
                                              {"ptb.train.txt", "train.txt"});
  const std::string path = find_data_file("ptb", folder, {ptb, plain});
  return {path, read_text(path)};
}

// Calls word(text) for each word, and with "<eos>" at the end of each line; a last line may lack its newline.
template <class Word>
void for_each_word(const TextFile& file, const Word& word) {
  constexpr std::string_view kBlanks = " \t\r\v\f";
  std::string_view rest = file.content;
  for (std::string_view line; next_line(rest, line); word(std::string_view("<eos>")))
    for (std::size_t at = 0; (at = line.find_first_not_of(kBlanks, at)) < line.size();) {
      const std::size_t stop = std::min(line.find_first_of(kBlanks, at), line.size());
      word(line.substr(at, stop - at));
      at = stop;
    }
}

using Vocabulary = std::unordered_map<std::string_view, std::int32_t>;

// Keeps views of the file's content.
Vocabulary vocabulary_of(const TextFile& training) {
  Vocabulary ids{{"<eos>", kEndOfLine}, {"<unk>", kUnknown}};
  for_each_word(training,
                [&](std::string_view word) { ids.try_emplace(word, static_cast<std::int32_t>(ids.size())); });
  if (ids.size() > kMostWords)
    throw UserError(fmt::format("'{}' has {} different words; a text may have {}", training.path, ids.size(),
                                kMostWords));
  return ids;
}

std::uint64_t vocabulary_checksum(const Vocabulary& ids) {
  std::vector<std::string_view> words(ids.size());
  for (const auto& [word, id] : ids) words[static_cast<std::size_t>(id)] = word;
  Checksum checksum;
  for (const std::string_view word : words) {
    checksum.update(std::as_bytes(std::span(word)));
    checksum.update(std::as_bytes(std::span("\n", 1)));  // no word has one
  }
  return checksum.value();
}

class Text final : public Dataset {
 public:
  Text(const DatasetOptions& options, Split split) : window_(options.sequence_length) {
    if (window_ < 1) throw UserError(fmt::format("data.sequence_length: {} is not at least 1", window_));
    const TextFile training = read_split(options, "train");
    const Vocabulary ids =
        with_memory("the vocabulary of '" + training.path + "'", static_cast<double>(training.content.size()),
                    [&] { return vocabulary_of(training); });
    words_ = static_cast<int>(ids.size());
    vocabulary_checksum_ = vocabulary_checksum(ids);
    const TextFile file =
        split == Split::train ? TextFile() : read_split(options, split == Split::test ? "valid" : "test");
    const TextFile& source = split == Split::train ? training : file;
    with_memory("the words of '" + source.path + "'", 2.0 * static_cast<double>(source.content.size()), [&] {
      for_each_word(source, [&](std::string_view word) {
        const auto found = ids.find(word);
        tokens_.push_back(found == ids.end() ? kUnknown : found->second);
      });
    });
    if (split != Split::held_out)
      tokens_.resize(
          static_cast<std::size_t>(limited_size(options, split, static_cast<std::int64_t>(tokens_.size()))));
    if (size() < 1)
      throw UserError(fmt::format(
          "data.sequence_length: '{}' has {} words with the ends of its lines, and a window takes {} "
          "and the word after them; lower it, or give a longer text",
          source.path, tokens_.size(), window_));
  }

  const std::string& name() const override { return name_; }
  Task task() const override { return Task::language_model; }
  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()) - window_; }
  Shape sample_shape() const override { return {window_, 1, 1}; }
  int classes() const override { return words_; }
  void get(std::int64_t index, float* sample) const override {
    for (std::int64_t t = 0; t < window_; ++t)
      sample[t] = static_cast<float>(there(index + t) ? token(index + t) : 0);
  }
  std::int32_t label(std::int64_t index) const override {
    return there(index + 1) ? token(index + 1) : kNoLabel;
  }
  bool add_to(Checksum& checksum) const override {
    checksum.update(std::as_bytes(std::span(tokens_)));
    return true;
  }
  std::uint64_t class_names_checksum() const override { return vocabulary_checksum_; }

 private:
  bool there(std::int64_t i) const { return i < static_cast<std::int64_t>(tokens_.size()); }
  std::int32_t token(std::int64_t i) const { return tokens_[static_cast<std::size_t>(i)]; }

  const std::string name_ = "text";
  std::int64_t window_;
  int words_ = 0;
  std::uint64_t vocabulary_checksum_ = 0;
  std::vector<std::int32_t> tokens_;
};

const bool text_registered = (add_dataset<Text>("text",
                                                "words of a text, to predict the next: the Penn Treebank's "
                                                "files, or train.txt, valid.txt and test.txt"),
                              true);

}  // namespace
}  // namespace topknot
