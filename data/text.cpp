// Texts. By words (data.tokens: word), as the Penn Treebank's language-model files have them (Mikolov et al.,
// "Recurrent neural network based language model", 2010): ptb.train.txt, ptb.valid.txt and ptb.test.txt, or
// train.txt and so on, words separated by blanks. Each line ends with the word <eos>. The vocabulary is the
// training file's words, in the order in which they first occur, after <eos> and <unk>; other words of the
// other files are <unk>.
// Bytes, 256 classes, or characters, the code points of UTF-8: the vocabulary is those of the training file
// in ascending order, and another one in the other files is refused. Both also take one file, input.txt,
// whose first int(0.9 n) of n tokens are for training and the others for validation, as nanoGPT's
// data/shakespeare_char/prepare.py has it; its vocabulary is that of the whole file, as there.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string_view>
#include <unordered_map>

#include "data/dataset.h"
#include "nn/base/checksum.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

constexpr std::size_t kMostWords = 1 << 24;  // all ids below are exact in a float
constexpr std::int32_t kEndOfLine = 0, kUnknown = 1;
constexpr char32_t kCodePoints = 0x110000;
constexpr const char* kOneFile = "input.txt";

const Option kTokens{
    .name = "tokens",
    .standard = "word",
    .help = "what a token is: a word, a byte, or a character of UTF-8 that the training text has",
    .choices = {"word", "byte", "char"}};

struct TextFile {
  std::string path, content;
};

struct Place {
  std::string fetched_by;  // the name that scripts/fetch-data has for such files
  std::string folder;
  bool one_file = false, has_test = false;
};

Place find_text(const DatasetOptions& options) {
  const bool words = options.get<std::string>(kTokens) == "word";
  Place place{words ? "ptb" : "tiny-shakespeare", "", false};
  std::vector<std::string> names = {"ptb.train.txt", "train.txt"};
  if (!words) names.push_back(kOneFile);
  place.folder =
      find_data_folder(place.fetched_by, options.root, {"ptb", "data", "simple-examples/data"}, names);
  const auto has = [&](const std::string& name) {
    std::error_code ignored;
    return std::filesystem::exists(std::filesystem::path(place.folder) / name, ignored);
  };
  place.one_file = !has(names[0]) && !has(names[1]);
  // The Penn Treebank has one; a text of one's own by characters need not.
  place.has_test = !place.one_file && (words || has("ptb.test.txt") || has("test.txt"));
  return place;
}

TextFile read_split(const Place& place, const std::string& split) {
  const std::string plain = split + ".txt", ptb = "ptb." + plain;
  const std::vector<std::string> names =
      place.one_file ? std::vector<std::string>{kOneFile} : std::vector<std::string>{ptb, plain};
  const std::string path = find_data_file(place.fetched_by, place.folder, names);
  return {path, read_text(path)};
}

int utf8_bytes(char32_t c) {
  return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
}

std::string utf8(char32_t c) {
  const int bytes = utf8_bytes(c);
  if (bytes == 1) return {static_cast<char>(c)};
  std::string text(static_cast<std::size_t>(bytes), '\0');
  for (int i = bytes - 1; i > 0; --i, c >>= 6)
    text[static_cast<std::size_t>(i)] = static_cast<char>(0x80 | (c & 0x3f));
  text[0] = static_cast<char>((0xf00 >> bytes & 0xff) | c);
  return text;
}

// The code point at byte `at`; kCodePoints if there is no UTF-8 (RFC 3629: shortest form, no surrogates).
char32_t code_point(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const char32_t first = byte(at);
  if (first < 0x80) return first;
  const std::size_t more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
  if (first < 0xc0 || first >= 0xf8 || at + more >= text.size()) return kCodePoints;
  char32_t c = first & (0x3f >> more);
  for (std::size_t i = at + 1; i <= at + more; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return kCodePoints;
    c = c << 6 | (byte(i) & 0x3f);
  }
  const bool surrogate = c >= 0xd800 && c < 0xe000;
  return c < kCodePoints && !surrogate && utf8_bytes(c) == static_cast<int>(more) + 1 ? c : kCodePoints;
}

// Calls character(code point, its first byte's position) for each.
void for_each_character(const TextFile& file, const auto& character) {
  for (std::size_t at = 0; at < file.content.size();) {
    const char32_t c = code_point(file.content, at);
    if (c == kCodePoints)
      throw UserError(
          fmt::format("'{}' is no UTF-8: its byte {} (from 0, after a byte order mark) begins no character; "
                      "convert it, or give data.tokens=byte",
                      file.path, at));
    character(c, at);
    at += static_cast<std::size_t>(utf8_bytes(c));
  }
}

// Calls word(text) for each word, and with "<eos>" at the end of each line; a last line may lack its newline.
void for_each_word(const TextFile& file, const auto& word) {
  constexpr std::string_view kBlanks = " \t\r\v\f";
  for_each_character(file, [](char32_t, std::size_t) {});  // which refuses what is no UTF-8
  std::string_view rest = file.content;
  for (std::string_view line; next_line(rest, line); word(std::string_view("<eos>")))
    for (std::size_t at = 0; (at = line.find_first_not_of(kBlanks, at)) < line.size();) {
      const std::size_t stop = std::min(line.find_first_of(kBlanks, at), line.size());
      word(line.substr(at, stop - at));
      at = stop;
    }
}

struct Tokens {
  std::vector<std::int32_t> ids;
  std::vector<std::string> texts;  // by id: the word, the bytes of the character, the byte
  std::size_t classes = 0;
  std::uint64_t vocabulary_checksum = 0;
};

using Words = std::unordered_map<std::string_view, std::int32_t>;

// Keeps views of the file's content.
Words words_of(const TextFile& training) {
  Words ids{{"<eos>", kEndOfLine}, {"<unk>", kUnknown}};
  for_each_word(training,
                [&](std::string_view word) { ids.try_emplace(word, static_cast<std::int32_t>(ids.size())); });
  if (ids.size() > kMostWords)
    throw UserError(fmt::format("'{}' has {} different words; a text may have {}", training.path, ids.size(),
                                kMostWords));
  return ids;
}

std::uint64_t checksum_of(const Words& ids) {
  std::vector<std::string_view> words(ids.size());
  for (const auto& [word, id] : ids) words[static_cast<std::size_t>(id)] = word;
  Checksum checksum;
  for (const std::string_view word : words) {
    checksum.update(std::as_bytes(std::span(word)));
    checksum.update(std::as_bytes(std::span("\n", 1)));  // no word has one
  }
  return checksum.value();
}

Tokens by_word(const TextFile& training, const TextFile& source) {
  const Words ids = words_of(training);
  Tokens tokens;
  tokens.texts.resize(ids.size());
  tokens.classes = ids.size(), tokens.vocabulary_checksum = checksum_of(ids);
  for (const auto& [word, id] : ids) tokens.texts[static_cast<std::size_t>(id)] = word;
  for_each_word(source, [&](std::string_view word) {
    const auto found = ids.find(word);
    tokens.ids.push_back(found == ids.end() ? kUnknown : found->second);
  });
  return tokens;
}

Tokens by_byte(const TextFile& source) {
  Tokens tokens;
  tokens.classes = 256;
  for (int byte = 0; byte < 256; ++byte) tokens.texts.emplace_back(1, static_cast<char>(byte));
  tokens.ids.reserve(source.content.size());
  for (const char c : source.content) tokens.ids.push_back(static_cast<unsigned char>(c));
  return tokens;
}

Tokens by_character(const TextFile& training, const TextFile& source) {
  constexpr std::int32_t kAbsent = -1;
  std::vector<std::int32_t> ids(kCodePoints, kAbsent);
  for_each_character(training, [&](char32_t c, std::size_t) { ids[c] = 0; });
  Tokens tokens;
  std::vector<char32_t> vocabulary;
  for (char32_t c = 0; c < kCodePoints; ++c) {
    if (ids[c] == kAbsent) continue;
    ids[c] = static_cast<std::int32_t>(vocabulary.size());
    vocabulary.push_back(c);
    tokens.texts.push_back(utf8(c));
  }
  tokens.classes = vocabulary.size();
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(vocabulary)));
  tokens.vocabulary_checksum = checksum.value();
  for_each_character(source, [&](char32_t c, std::size_t at) {
    if (ids[c] == kAbsent)
      throw UserError(fmt::format(
          "'{}': the character '{}' (U+{:04X}) at byte {} is not in '{}', whose characters are the "
          "vocabulary; remove it, or give data.tokens=byte",
          source.path, one_line(source.content.substr(at, static_cast<std::size_t>(utf8_bytes(c)))),
          static_cast<std::uint32_t>(c), at, training.path));
    tokens.ids.push_back(ids[c]);
  });
  return tokens;
}

class Text final : public Dataset {
 public:
  Text(const DatasetOptions& options, Split split)
      : token_name_(options.get<std::string>(kTokens)), window_(options.get<int>(option::sequence_length)) {
    if (token_name_ == "char") token_name_ = "character";
    const auto tokenised = [&](const TextFile& training, const TextFile& source) {
      return token_name_ == "word"   ? by_word(training, source)
             : token_name_ == "byte" ? by_byte(source)
                                     : by_character(training, source);
    };
    if (options.stored_vocabulary) {
      tokens_ = tokenised({"the stored vocabulary", *options.stored_vocabulary}, {});
      return;
    }
    const Place place = find_text(options);
    has_held_out_ = place.has_test;
    const TextFile training = read_split(place, "train");
    const TextFile file = split == Split::train || place.one_file
                              ? TextFile()
                              : read_split(place, split == Split::test ? "valid" : "test");
    const TextFile& source = file.path.empty() ? training : file;
    const double bytes = static_cast<double>(training.content.size() + 2 * source.content.size());
    tokens_ = with_memory("the tokens of '" + source.path + "'", bytes,
                          [&] { return tokenised(training, source); });
    std::vector<std::int32_t>& ids = tokens_.ids;
    if (place.one_file) {
      constexpr double kTraining = 0.9;
      const auto cut = static_cast<std::ptrdiff_t>(static_cast<double>(ids.size()) * kTraining);
      if (split == Split::train)
        ids.erase(ids.begin() + cut, ids.end());
      else
        ids.erase(ids.begin(), ids.begin() + cut);
    }
    if (split != Split::held_out)
      ids.resize(
          static_cast<std::size_t>(limited_size(options, split, static_cast<std::int64_t>(ids.size()))));
    if (size() < 1)
      throw UserError(
          fmt::format("data.sequence_length: {}'{}' has {} {}s{}, and a window takes {} and the {} after "
                      "them; lower it, or give a longer text",
                      !place.one_file         ? ""
                      : split == Split::train ? "the training part of "
                                              : "the validation part of ",
                      source.path, ids.size(), token_name_, by_words() ? " with the ends of its lines" : "",
                      window_, token_name_));
  }

  const std::string& name() const override { return name_; }
  Task task() const override { return Task::language_model; }
  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.ids.size()) - window_; }
  Shape sample_shape() const override { return {window_, 1, 1}; }
  int classes() const override { return static_cast<int>(tokens_.classes); }
  const std::string& token_name() const override { return token_name_; }
  double bytes_per_token() const override {
    if (by_words()) return 0;
    double bytes = 0;
    for (const std::int32_t id : tokens_.ids) bytes += static_cast<double>(text(id).size());
    return bytes / static_cast<double>(tokens_.ids.size());
  }
  bool has_held_out() const override { return has_held_out_; }
  void get(std::int64_t index, float* sample) const override {
    for (std::int64_t t = 0; t < window_; ++t)
      sample[t] = static_cast<float>(there(index + t) ? token(index + t) : 0);
  }
  std::int32_t label(std::int64_t index) const override {
    return there(index + 1) ? token(index + 1) : kNoLabel;
  }
  bool add_to(Checksum& checksum) const override {
    checksum.update(std::as_bytes(std::span(tokens_.ids)));
    return true;
  }
  std::uint64_t class_names_checksum() const override { return tokens_.vocabulary_checksum; }
  std::vector<std::int32_t> encode(const std::string& words) const override {
    std::unordered_map<std::string_view, std::int32_t> ids;
    for (const std::string& one : tokens_.texts) ids.emplace(one, static_cast<std::int32_t>(ids.size()));
    const TextFile file{"the text to go on with", words};
    std::vector<std::int32_t> tokens;
    if (by_words()) {
      std::set<std::string> unknown;
      for_each_word(file, [&](std::string_view word) {
        const auto found = ids.find(word);
        if (found == ids.end()) unknown.emplace(word);
        tokens.push_back(found == ids.end() ? kUnknown : found->second);
      });
      if (!unknown.empty())
        log_warning(fmt::format("{}: not among the {} words of the training text, and read as <unk>: {}",
                                file.path, ids.size(),
                                one_line(fmt::format("{}", fmt::join(unknown, ", ")))));
      if (!words.ends_with('\n') && !tokens.empty()) tokens.pop_back();  // the last line has no end yet
    } else if (token_name_ == "byte") {
      tokens = by_byte(file).ids;
    } else {
      for_each_character(file, [&](char32_t c, std::size_t at) {
        const auto found = ids.find(utf8(c));
        if (found == ids.end())
          throw UserError(fmt::format(
              "'{}': the character '{}' (U+{:04X}) at byte {} is not among the {} of the training text",
              file.path, one_line(utf8(c)), static_cast<std::uint32_t>(c), at, ids.size()));
        tokens.push_back(found->second);
      });
    }
    return tokens;
  }
  std::string token_text(std::int32_t token) const override {
    if (!by_words()) return text(token);
    return token == kEndOfLine ? "\n" : text(token) + " ";
  }
  // A training text of the same vocabulary.
  std::string vocabulary() const override {
    if (token_name_ == "byte") return "";
    return fmt::format("{}", fmt::join(tokens_.texts, by_words() ? "\n" : ""));
  }

 private:
  bool there(std::int64_t i) const { return i < static_cast<std::int64_t>(tokens_.ids.size()); }
  bool by_words() const { return token_name_ == "word"; }
  const std::string& text(std::int32_t token) const { return tokens_.texts[static_cast<std::size_t>(token)]; }
  std::int32_t token(std::int64_t i) const { return tokens_.ids[static_cast<std::size_t>(i)]; }

  const std::string name_ = "text";
  std::string token_name_;
  std::int64_t window_;
  bool has_held_out_ = true;
  Tokens tokens_;
};

const bool text_registered =
    add_dataset<Text>("text",
                      "words, characters or bytes of a text (data.tokens), to predict the next: the Penn "
                      "Treebank's files; train.txt, valid.txt and test.txt; or input.txt",
                      {option::sequence_length, kTokens, option::windows()});

}  // namespace
}  // namespace topknot
