// Token files: shards of ids that another program made of a text, mapped, so that they may be larger than
// memory. Two formats, told apart by their first four bytes:
//   nanoGPT   little-endian uint16, no header (data/*/prepare.py);
//   llm.c     256 little-endian int32 of which [0] is the magic number, [1] the version and [2] the number of
//             tokens, then the tokens: 20240520, version 1: uint16; 20240801, version 7: uint32
//             (dev/data/data_common.py).
// Names in data.root: S.bin, S_N.bin, NAME_S.bin or NAME_S_N.bin with S = train, val or (optional, evaluated
// once at the end) test, and N a number, by which shards are put in order. All shards of a split are one
// stream, without a gap. Formats and sizes are checked when the set is made, tokens when they are read: a set
// of many GB begins at once. Files must not become shorter while a run reads them (SIGBUS).
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

#include "data/dataset.h"
#include "nn/base/checksum.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kHeaderBytes = 1024;

struct Format {
  std::uint32_t magic, version;
  std::int64_t token_bytes;
};
constexpr Format kWithHeader[] = {{20240520, 1, 2}, {20240801, 7, 4}};
// Other files of llm.c, which look like tokens: evaluation sets, weights, optimizer states, tokenizers.
constexpr std::uint32_t kOtherMagic[] = {20240522, 20240326, 20240327, 20240328};

// Little-endian.
std::uint32_t number_at(const unsigned char* bytes, std::int64_t size) {
  std::uint32_t value = 0;
  for (std::int64_t i = size; i-- > 0;) value = value << 8 | bytes[i];
  return value;
}

// A whole file, mapped for reading.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const Fd file = open_regular_file(path);
    struct stat status {};
    if (fstat(file.get(), &status) != 0)
      throw UserError(fmt::format("cannot read '{}': {}; check the disk", path, errno_text()));
    size_ = status.st_size;
    if (size_ == 0) throw UserError(fmt::format("'{}' is empty; it must hold tokens", path));
    void* memory = mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED)
      throw UserError(
          fmt::format("cannot map '{}' of {}: {}; the limit of address space (ulimit -v) may be "
                      "too low",
                      path, format_bytes(static_cast<double>(size_)), errno_text()));
    bytes_ = static_cast<const unsigned char*>(memory);
  }
  ~MappedFile() {
    if (bytes_) munmap(const_cast<unsigned char*>(bytes_), static_cast<std::size_t>(size_));
  }
  MappedFile(MappedFile&& other) noexcept
      : bytes_(std::exchange(other.bytes_, nullptr)), size_(other.size_) {}
  MappedFile& operator=(MappedFile&&) = delete;

  const unsigned char* bytes() const { return bytes_; }
  std::int64_t size() const { return size_; }

 private:
  const unsigned char* bytes_ = nullptr;
  std::int64_t size_ = 0;
};

class Shard {
 public:
  // `first`: the number of its first token in the stream.
  Shard(const std::string& path, std::int64_t first) : path_(path), file_(path), first_(first) {
    const std::uint32_t magic = file_.size() >= 4 ? number_at(file_.bytes(), 4) : 0;
    for (const Format& format : kWithHeader)
      if (magic == format.magic) {
        read_header(format);
        return;
      }
    if (std::ranges::find(kOtherMagic, magic) != std::end(kOtherMagic))
      throw UserError(
          fmt::format("'{}' holds no tokens: its first number, {}, is that of llm.c's evaluation sets, "
                      "weights or tokenizers; give files with 20240520, 20240801 or no header",
                      path_, magic));
    if (file_.size() % token_bytes_ != 0)
      throw UserError(
          fmt::format("'{}' has {} bytes, an odd number, and tokens without a header have 2 bytes each; it "
                      "was cut short, or is of another format",
                      path_, file_.size()));
    count_ = file_.size() / token_bytes_;
  }

  std::int64_t first() const { return first_; }
  std::int64_t end() const { return first_ + count_; }
  const MappedFile& file() const { return file_; }

  // Token `index` of the stream, which is in this shard.
  std::int32_t token(std::int64_t index, std::int64_t vocabulary) const {
    const std::int64_t at = header_ + (index - first_) * token_bytes_;
    const std::uint32_t token = number_at(file_.bytes() + at, token_bytes_);
    if (token >= vocabulary)
      throw UserError(
          fmt::format("'{}': token {} (from 0, at byte {}) is {}, and data.vocabulary has {}; raise it if "
                      "the tokenizer has more, or else make the file anew",
                      path_, index - first_, at, token, vocabulary));
    return static_cast<std::int32_t>(token);
  }

 private:
  void read_header(const Format& format) {
    const auto refuse = [&](const std::string& what) {
      throw UserError(
          fmt::format("'{}', which begins as llm.c's token files do ({}), {}; make or fetch it "
                      "anew",
                      path_, format.magic, what));
    };
    if (file_.size() < kHeaderBytes)
      refuse(fmt::format("has {} bytes, and the header alone has {}", file_.size(), kHeaderBytes));
    if (const std::uint32_t version = number_at(file_.bytes() + 4, 4); version != format.version)
      refuse(fmt::format("is of version {}, and version {} is known", version, format.version));
    const std::int64_t count = number_at(file_.bytes() + 8, 4);
    const std::int64_t expected = kHeaderBytes + count * format.token_bytes;
    if (file_.size() != expected)
      refuse(fmt::format("has {} bytes, and {} tokens as its header says take {}", file_.size(), count,
                         expected));
    header_ = kHeaderBytes, token_bytes_ = format.token_bytes, count_ = count;
    if (count == 0) refuse("has no token");
  }

  std::string path_;
  MappedFile file_;
  std::int64_t first_, header_ = 0, token_bytes_ = 2, count_ = 0;
};

bool is_number(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// What precedes the split's name in a shard's file name, and the number behind it.
struct ShardName {
  std::string file, set, number;
};

// Of the files in data.root those of the split, in order; none if it has none. UserError if they are of
// several sets.
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
  return found;
}

class TokenFiles final : public Dataset {
 public:
  TokenFiles(const DatasetOptions& options, Split split)
      : window_(options.sequence_length),
        vocabulary_(options.vocabulary),
        bytes_per_token_(options.bytes_per_token) {
    if (window_ < 1) throw UserError(fmt::format("data.sequence_length: {} is not at least 1", window_));
    const std::string& root = options.root;
    if (root.empty())
      throw UserError("data.root is not set: tokens needs the folder that holds train.bin and val.bin");
    std::error_code ignored;
    if (!fs::is_directory(root, ignored))
      throw UserError(fmt::format("data.root: '{}': there is no such folder", root));
    const std::string part = split == Split::train ? "train" : split == Split::test ? "val" : "test";
    for (const ShardName& name : shards_of(root, part)) {
      shards_.emplace_back((fs::path(root) / name.file).string(), tokens_);
      tokens_ = shards_.back().end();
    }
    if (shards_.empty())
      throw UserError(
          fmt::format("data.root: '{0}': there is no {1}.bin, NAME_{1}.bin or NAME_{1}_000000.bin "
                      "in it, as nanoGPT and llm.c write them",
                      root, part));
    if (split != Split::held_out) tokens_ = limited_size(options, split, tokens_);
    has_held_out_ = !shards_of(root, "test").empty();
    if (size() < 1)
      throw UserError(
          fmt::format("data.sequence_length: the {} files in '{}' have {} tokens, and a window "
                      "takes {} and the token after them; lower it, or give more tokens",
                      part, root, tokens_, window_));
  }

  const std::string& name() const override { return name_; }
  Task task() const override { return Task::language_model; }
  std::int64_t size() const override { return tokens_ - window_; }
  Shape sample_shape() const override { return {window_, 1, 1}; }
  int classes() const override { return vocabulary_; }
  double bytes_per_token() const override { return bytes_per_token_; }
  bool has_held_out() const override { return has_held_out_; }
  bool mapped() const override { return true; }
  void get(std::int64_t index, float* sample) const override {
    const std::int64_t there = std::clamp<std::int64_t>(tokens_ - index, 0, window_);
    for (std::int64_t t = 0; t < there; ++t) sample[t] = static_cast<float>(token(index + t));
    std::fill(sample + there, sample + window_, 0.0f);
  }
  std::int32_t label(std::int64_t index) const override {
    return index + 1 < tokens_ ? token(index + 1) : kNoLabel;
  }

  // Of each shard its length, its beginning, its end, and pieces in between.
  bool add_to(Checksum& checksum) const override {
    constexpr std::int64_t kPieces = 64, kPieceBytes = 4096;
    checksum.update(std::as_bytes(std::span(&tokens_, 1)));
    for (const Shard& shard : shards_) {
      const std::int64_t size = shard.file().size(), piece = std::min(kPieceBytes, size);
      checksum.update(std::as_bytes(std::span(&size, 1)));
      const std::int64_t pieces = std::min(kPieces, (size + piece - 1) / piece);
      for (std::int64_t i = 0; i < pieces; ++i) {
        const std::int64_t at = pieces == 1 ? 0 : (size - piece) / (pieces - 1) * i;
        checksum.update(std::as_bytes(std::span(shard.file().bytes() + (i + 1 == pieces ? size - piece : at),
                                                static_cast<std::size_t>(piece))));
      }
    }
    return true;
  }

 private:
  std::int32_t token(std::int64_t index) const {
    const auto after = std::ranges::upper_bound(shards_, index, {}, &Shard::first);
    return (after - 1)->token(index, vocabulary_);
  }

  const std::string name_ = "tokens";
  std::int64_t window_, tokens_ = 0;
  int vocabulary_;
  double bytes_per_token_;
  bool has_held_out_ = false;
  std::vector<Shard> shards_;
};

const bool tokens_registered =
    (add_dataset<TokenFiles>("tokens",
                             "token files of a language model: train.bin and val.bin of nanoGPT, shards of "
                             "llm.c"),
     true);

}  // namespace
}  // namespace topknot
