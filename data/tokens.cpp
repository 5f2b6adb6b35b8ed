// Token files: shards of ids that another program made of a text, read window by window, so that they may be
// larger than memory. Told apart by their first four bytes:
//   nanoGPT   no header (data/*/prepare.py): little-endian uint16, or what data.token_type says;
//   llm.c     256 little-endian int32 of which [0] is the magic number, [1] the version and [2] the number of
//             tokens, then the tokens: 20240520, version 1: uint16; 20240801, version 7: uint32
//             (dev/data/data_common.py).
// Names in data.root: S.bin, S_N.bin, NAME_S.bin or NAME_S_N.bin with S = train, val or (optional, evaluated
// once at the end) test, and N a number, by which shards are put in order. All shards of a split are one
// stream, without a gap. Formats and sizes are checked when the set is made, tokens when they are read: a set
// of many GB begins at once. Files are not mapped: one that becomes shorter would give zeros, then SIGBUS.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <tuple>

#include "data/dataset.h"
#include "nn/base/checksum.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kHeaderBytes = 1024;
constexpr int kUint16Values = 1 << 16;

struct TokenType {
  const char* name;  // as data.token_type has it
  std::int64_t bytes;
};
constexpr TokenType kUint16{"uint16", 2}, kUint32{"uint32", 4}, kInt64{"int64", 8};

struct Format {
  std::uint32_t magic, version;
  TokenType type;
};
constexpr Format kWithHeader[] = {{20240520, 1, kUint16}, {20240801, 7, kUint32}};
// Other files of llm.c, which look like tokens: evaluation sets, weights, optimizer states, tokenizers.
constexpr std::uint32_t kOtherMagic[] = {20240522, 20240326, 20240327, 20240328};

// Little-endian.
std::uint64_t number_at(const unsigned char* bytes, std::int64_t size) {
  std::uint64_t value = 0;
  for (std::int64_t i = size; i-- > 0;) value = value << 8 | bytes[i];
  return value;
}

const Option kTokenType{
    .name = "token_type",
    .standard = "auto",
    .help =
        "the type of tokens in files without a header; auto: uint16, and files that look wider are refused",
    .choices = {"auto", "uint16", "uint32", "int64"}};
const Option kVocabulary{"vocabulary", 50257,
                         "how many different tokens the model has; a greater one in the files ends the run",
                         2, 1e7};
const Option kBytesPerToken{"bytes_per_token", 0.0,
                            "mean bytes of the validation text per token, for bits per byte; 0: not known", 0,
                            1e6};

class Shard {
 public:
  // `first`: the number of its first token in the stream.
  Shard(const std::string& path, std::int64_t first, const DatasetOptions& options)
      : path_(path), file_(open_regular_file(path)), first_(first) {
    struct stat status {};
    if (fstat(file_.get(), &status) != 0) cannot_read();
    size_ = status.st_size;
    if (size_ == 0) throw UserError(fmt::format("'{}' is empty; it must hold tokens", path));
    std::vector<unsigned char> begin(static_cast<std::size_t>(std::min<std::int64_t>(size_, 8192)));
    read(0, begin);
    const auto magic = static_cast<std::uint32_t>(size_ >= 4 ? number_at(begin.data(), 4) : 0);
    if (std::ranges::find(kOtherMagic, magic) != std::end(kOtherMagic))
      throw UserError(
          fmt::format("'{}' holds no tokens: its first number, {}, is that of llm.c's evaluation sets, "
                      "weights or tokenizers; give files with 20240520, 20240801 or no header",
                      path_, magic));
    const std::string given = options.get<std::string>(kTokenType);
    const bool known = given != "auto";
    if (const auto* format = std::ranges::find(kWithHeader, magic, &Format::magic);
        format != std::end(kWithHeader)) {
      if (known && given != format->type.name)
        throw UserError(fmt::format("data.token_type: the header of '{}' says {}, not {}; leave the key out",
                                    path_, format->type.name, given));
      read_header(*format, begin);
    } else {
      for (const TokenType& type : {kUint32, kInt64})
        if (given == type.name) type_ = type;
      if (size_ % type_.bytes != 0)
        throw UserError(
            fmt::format("'{}' has {} bytes, no multiple of the {} of a token without a header ({}); it was "
                        "cut short, or is of another format (data.token_type)",
                        path_, size_, type_.bytes, type_.name));
      if (!known) refuse_wider_type(begin);
      count_ = size_ / type_.bytes;
    }
    if (const int vocabulary = options.get<int>(kVocabulary);
        !known && type_.bytes == kUint16.bytes && vocabulary > kUint16Values)
      throw UserError(
          fmt::format("data.vocabulary: {} is more than the {} values of uint16, the type of '{}'; lower it, "
                      "or give the file's own type in data.token_type",
                      vocabulary, kUint16Values, path_));
  }

  std::int64_t first() const { return first_; }
  std::int64_t end() const { return first_ + count_; }
  std::int64_t size() const { return size_; }

  void read(std::int64_t at, std::span<unsigned char> bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = pread(file_.get(), bytes.data(), bytes.size(), at);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) cannot_read();
      if (count == 0)
        throw UserError(
            fmt::format("'{}' has become shorter: it had {} bytes when the run began, and ends at byte {} "
                        "now; restore it, and resume the run",
                        path_, size_, at));
      at += count, bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  }

  // Tokens of the stream from `index` on, which are all in this shard.
  void read_tokens(std::int64_t index, std::span<std::int32_t> tokens, int vocabulary) const {
    const std::int64_t at = header_ + (index - first_) * type_.bytes;
    std::vector<unsigned char> bytes(tokens.size() * static_cast<std::size_t>(type_.bytes));
    read(at, bytes);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::int64_t offset = static_cast<std::int64_t>(i) * type_.bytes;
      const std::uint64_t token = number_at(bytes.data() + offset, type_.bytes);
      if (token >= static_cast<std::uint64_t>(vocabulary))
        throw UserError(fmt::format(
            "'{}': token {} (from 0, at byte {}) is {} as {}, and data.vocabulary has {}; raise it if the "
            "tokenizer has more, give the file's own data.token_type, or make the file anew",
            path_, index - first_ + static_cast<std::int64_t>(i), at + offset,
            static_cast<std::int64_t>(token), type_.name, vocabulary));
      tokens[i] = static_cast<std::int32_t>(token);
    }
  }

 private:
  [[noreturn]] void cannot_read() const {
    throw UserError(fmt::format("cannot read '{}': {}; check the disk", path_, errno_text()));
  }

  // Wider tokens below 65536 have zeros in every second 16-bit word, or in three of four.
  void refuse_wider_type(std::span<const unsigned char> begin) const {
    std::array<std::size_t, 4> zeros{};
    const std::size_t groups = begin.size() / 8;
    for (std::size_t i = 0; i < 4 * groups; ++i) zeros[i % 4] += number_at(&begin[2 * i], 2) == 0;
    const auto mostly = [&](std::size_t word) { return 4 * zeros[word] >= 3 * groups; };
    constexpr std::size_t kFewest = 4;  // groups that tell
    if (groups < kFewest || mostly(0) || !mostly(1) || !mostly(3)) return;
    const char* const type = mostly(2) ? kInt64.name : kUint32.name;
    throw UserError(
        fmt::format("'{}' has no header and looks like tokens of {}: {} of its first 16-bit words are zero; "
                    "give data.token_type={}, or uint16 if that is what it holds",
                    path_, type, mostly(2) ? "three of four" : "every second", type));
  }

  void read_header(const Format& format, std::span<const unsigned char> begin) {
    const auto refuse = [&](const std::string& what) {
      throw UserError(
          fmt::format("'{}', which begins as llm.c's token files do ({}), {}; make or fetch it anew", path_,
                      format.magic, what));
    };
    if (size_ < kHeaderBytes)
      refuse(fmt::format("has {} bytes, and the header alone has {}", size_, kHeaderBytes));
    if (const std::uint64_t version = number_at(&begin[4], 4); version != format.version)
      refuse(fmt::format("is of version {}, and version {} is known", version, format.version));
    const auto count = static_cast<std::int64_t>(number_at(&begin[8], 4));
    const std::int64_t expected = kHeaderBytes + count * format.type.bytes;
    if (size_ != expected)
      refuse(fmt::format("has {} bytes, and {} tokens as its header says take {}", size_, count, expected));
    header_ = kHeaderBytes, type_ = format.type, count_ = count;
    if (count == 0) refuse("has no token");
  }

  std::string path_;
  Fd file_;
  std::int64_t first_, size_ = 0, header_ = 0, count_ = 0;
  TokenType type_ = kUint16;
};

bool is_number(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// The parts of a shard's file name: the text before the split's name, and the number after it.
struct ShardName {
  std::string file, set, number;
};

// The split's shards among data.root's files, in order, or none. UserError if they are of several sets.
std::vector<ShardName> shards_of(const std::string& root, const std::string& split) {
  std::vector<ShardName> found;
  std::error_code error;
  for (fs::directory_iterator entry(root, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path path = entry->path();
    if (path.extension() != ".bin") continue;
    std::string stem = path.stem().string(), number;
    if (const auto at = stem.rfind('_'); at != stem.npos && is_number(stem.substr(at + 1)))
      number = stem.substr(at + 1), stem.resize(at);
    if (stem == split)
      found.push_back({path.filename().string(), "", number});
    else if (stem.ends_with("_" + split))
      found.push_back({path.filename().string(), stem.substr(0, stem.size() - split.size() - 1), number});
  }
  if (error) throw UserError(fmt::format("data.root: '{}' cannot be read: {}", root, error.message()));
  const auto place = [](const ShardName& name) {  // by number: 2 before 10, 01 before 2
    const std::string digits =
        name.number.substr(std::min(name.number.find_first_not_of('0'), name.number.size()));
    return std::tuple(name.set, digits.size(), digits);
  };
  std::ranges::sort(found, {}, place);
  if (!found.empty() && found.front().set != found.back().set)
    throw UserError(
        fmt::format("data.root: '{}' holds {} files of several sets, {} and {}; leave one set there", root,
                    split, found.front().file, found.back().file));
  for (std::size_t i = 1; i < found.size(); ++i)
    if (found[0].number.empty() || place(found[i - 1]) == place(found[i]))
      throw UserError(
          fmt::format("data.root: '{}': {} and {} cannot both be parts of the {} files; leave one there",
                      root, found[i - 1].file, found[i].file, split));
  const auto number = [](const ShardName& name) { return std::strtoull(name.number.c_str(), nullptr, 10); };
  for (std::size_t i = 1; i < found.size(); ++i)
    if (number(found[i]) != number(found[i - 1]) + 1)
      throw UserError(
          fmt::format("data.root: '{}': there is no {} file of number {}, between {} and {}; fetch it, or "
                      "number the files anew without a gap",
                      root, split, number(found[i - 1]) + 1, found[i - 1].file, found[i].file));
  return found;
}

class TokenFiles final : public Dataset {
 public:
  TokenFiles(const DatasetOptions& options, Split split)
      : window_(options.get<int>(option::sequence_length)),
        vocabulary_(options.get<int>(kVocabulary)),
        bytes_per_token_(options.get<double>(kBytesPerToken)) {
    if (options.stored_vocabulary) return;
    const std::string& root = options.root;
    if (root.empty())
      throw UserError("data.root is not set: tokens needs the folder that holds train.bin and val.bin");
    std::error_code ignored;
    if (!fs::is_directory(root, ignored))
      throw UserError(fmt::format("data.root: '{}': there is no such folder", root));
    const std::string part = split == Split::train ? "train" : split == Split::test ? "val" : "test";
    const std::vector<ShardName> names = shards_of(root, part);
    // All of them stay open, and by default a process may have 1,024 files.
    if (rlimit limit{}; getrlimit(RLIMIT_NOFILE, &limit) == 0) {
      limit.rlim_cur += std::min<rlim_t>(limit.rlim_max - limit.rlim_cur, names.size());
      setrlimit(RLIMIT_NOFILE, &limit);
    }
    for (const ShardName& name : names) {
      shards_.emplace_back((fs::path(root) / name.file).string(), tokens_, options);
      tokens_ = shards_.back().end();
    }
    if (shards_.empty())
      throw UserError(
          fmt::format("data.root: '{0}': there is no {1}.bin, NAME_{1}.bin or NAME_{1}_000000.bin in it, as "
                      "nanoGPT and llm.c write them",
                      root, part));
    if (split != Split::held_out) tokens_ = limited_size(options, split, tokens_);
    has_held_out_ = !shards_of(root, "test").empty();
    if (size() < 1)
      throw UserError(
          fmt::format("data.sequence_length: the {} files in '{}' have {} tokens, and a window takes {} and "
                      "the token after them; lower it, or give more tokens",
                      part, root, tokens_, window_));
  }

  const std::string& name() const override { return name_; }
  Task task() const override { return Task::language_model; }
  std::int64_t size() const override { return tokens_ - window_; }
  Shape sample_shape() const override { return {window_, 1, 1}; }
  int classes() const override { return vocabulary_; }
  double bytes_per_token() const override { return bytes_per_token_; }
  bool has_held_out() const override { return has_held_out_; }
  bool on_disk() const override { return true; }
  void get(std::int64_t index, float* sample) const override {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(window_));
    read(index, tokens, 0);
    std::ranges::copy(tokens, sample);
  }
  std::int32_t label(std::int64_t index) const override {
    std::int32_t token;
    read(index + 1, {&token, 1}, kNoLabel);
    return token;
  }
  void window_labels(std::int64_t index, std::span<std::int32_t> labels) const override {
    read(index + 1, labels, kNoLabel);
  }

  // Adds each shard's length, its begin, its end, and pieces in between.
  bool add_to(Checksum& checksum) const override {
    constexpr std::int64_t kPieces = 64, kPieceBytes = 4096;
    checksum.update(std::as_bytes(std::span(&tokens_, 1)));
    for (const Shard& shard : shards_) {
      const std::int64_t size = shard.size(), piece = std::min(kPieceBytes, size);
      checksum.update(std::as_bytes(std::span(&size, 1)));
      const std::int64_t pieces = std::min(kPieces, (size + piece - 1) / piece);
      std::vector<unsigned char> bytes(static_cast<std::size_t>(piece));
      for (std::int64_t i = 0; i < pieces; ++i) {
        const std::int64_t at = pieces == 1 ? 0 : (size - piece) / (pieces - 1) * i;
        shard.read(i + 1 == pieces ? size - piece : at, bytes);
        checksum.update(std::as_bytes(std::span(bytes)));
      }
    }
    return true;
  }

 private:
  // Tokens from `index` on; `beyond` for those after the stream's end.
  void read(std::int64_t index, std::span<std::int32_t> tokens, std::int32_t beyond) const {
    auto shard = std::ranges::upper_bound(shards_, index, {}, &Shard::first) - 1;
    while (!tokens.empty() && index < tokens_) {
      const std::int64_t count =
          std::min({static_cast<std::int64_t>(tokens.size()), tokens_ - index, shard->end() - index});
      shard++->read_tokens(index, tokens.first(static_cast<std::size_t>(count)), vocabulary_);
      index += count, tokens = tokens.subspan(static_cast<std::size_t>(count));
    }
    std::ranges::fill(tokens, beyond);
  }

  const std::string name_ = "tokens";
  std::int64_t window_, tokens_ = 0;
  int vocabulary_;
  double bytes_per_token_;
  bool has_held_out_ = false;
  std::vector<Shard> shards_;
};

const bool tokens_registered = add_dataset<TokenFiles>(
    "tokens", "token files of a language model: train.bin and val.bin of nanoGPT, shards of llm.c",
    {option::sequence_length, option::windows(), kTokenType, kVocabulary, kBytesPerToken});

}  // namespace
}  // namespace topknot
