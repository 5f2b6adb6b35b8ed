#include "train/checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "nn/base/text.h"

namespace topknot {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie");

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // as the reference implementation
constexpr std::size_t kAlignment = 8;                  // of the data in the file
// How other files begin, and what to do about them.
constexpr std::pair<std::string_view, const char*> kOtherFiles[] = {
    {"version https://git-lfs", "a Git LFS pointer, which 'git lfs pull' replaces by the file"},
    {"<!DOCTYPE", "a web page; download the file itself"},
    {"<!doctype", "a web page; download the file itself"},
    {"<html", "a web page; download the file itself"},
    {"GGUF", "a GGUF file of llama.cpp; take the model's safetensors file"},
    {"PK\x03\x04", "a zip file, such as torch.save() writes; scripts/convert-pth reads a .pth"},
    {"\x80\x02", "a pickle of Python; scripts/convert-pth reads a .pth"},
    {"{",
     "JSON; if it is the index of weights in several files, save them as one: in transformers "
     "save_pretrained(DIR, max_shard_size=\"1TB\")"}};
constexpr const char *kMetadata = "__metadata__", *kGradients = "gradients";

constexpr std::pair<std::string_view, std::size_t> kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"C64", 8}, {"F64", 8}, {"I64", 8},     {"U64", 8},
};

// Bytes that a tensor takes; nullopt if the number does not fit in 64 bits.
std::optional<std::uint64_t> tensor_bytes(const std::vector<std::int64_t>& shape, std::size_t width) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t bytes = width;
  for (const std::int64_t n : shape) {
    if (n < 0 || bytes > std::numeric_limits<std::uint64_t>::max() / static_cast<std::uint64_t>(n))
      return std::nullopt;
    bytes *= static_cast<std::uint64_t>(n);
  }
  return bytes;
}

struct TensorEntry {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::uint64_t> offsets;  // begin, end
};

// The header's JSON, read event by event: nesting is bounded by the format, a key that stands twice is seen.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string where) : where_(std::move(where)) {}

  std::vector<TensorEntry> tensors;
  Metadata metadata;

  [[noreturn]] void refuse(const std::string& what) const {
    throw UserError(fmt::format("{}: not a valid safetensors file: {}", where_, what));
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::start) {
      place_ = Place::file;
    } else if (place_ == Place::file) {
      place_ = name_ == kMetadata ? Place::metadata : Place::tensor;
      if (place_ == Place::tensor) tensors.push_back({name_, {}, {}, {}});
      fields_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == Place::file) {
      if (!names_.insert(key).second) refuse(fmt::format("{} stands twice", quoted_text(key)));
      name_ = key;
      return true;
    }
    if (place_ == Place::tensor && key != "dtype" && key != "shape" && key != "data_offsets")
      refuse(fmt::format("{}: unknown field {}", entry(), quoted_text(key)));
    if (!fields_.insert(key).second) refuse(fmt::format("{}: {} stands twice", entry(), quoted_text(key)));
    field_ = key;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor)
      for (const char* field : {"dtype", "shape", "data_offsets"})
        if (!fields_.count(field)) refuse(fmt::format("{}: {} is missing", entry(), field));
    place_ = place_ == Place::file ? Place::end : Place::file;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") unexpected("a list");
    place_ = field_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && tensors.back().offsets.size() != 2)
      refuse(fmt::format("{}: data_offsets has {} numbers, not 2", entry(), tensors.back().offsets.size()));
    place_ = Place::tensor;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape && value <= std::numeric_limits<std::int64_t>::max())
      tensors.back().shape.push_back(static_cast<std::int64_t>(value));
    else if (place_ == Place::offsets)
      tensors.back().offsets.push_back(value);
    else
      unexpected(fmt::format("{}", value));
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata)
      metadata[field_] = value;
    else if (place_ == Place::tensor && field_ == "dtype")
      tensors.back().dtype = value;
    else
      unexpected("a text");
    return true;
  }

  bool number_integer(std::int64_t) override { unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { unexpected("a fraction or a number too large"); }
  bool boolean(bool) override { unexpected("true or false"); }
  bool null() override { unexpected("null"); }
  bool binary(nlohmann::json::binary_t&) override { unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    refuse(fmt::format("the header is no JSON at its byte {}", position));
  }

 private:
  enum class Place { start, file, metadata, tensor, shape, offsets, end };

  std::string entry() const {
    return place_ == Place::metadata ? kMetadata : fmt::format("tensor {}", quoted_text(name_));
  }

  [[noreturn]] void unexpected(const std::string& what) const {
    if (place_ == Place::start) refuse(fmt::format("the header is {}, not an object", what));
    if (place_ == Place::file) refuse(fmt::format("{} is {}, not an object", quoted_text(name_), what));
    if (place_ == Place::metadata)
      refuse(fmt::format("{}: {} is {}, not a text", entry(), quoted_text(field_), what));
    refuse(fmt::format("{}: {} has {}, where {} is expected", entry(), field_, what,
                       place_ != Place::tensor ? "a whole number"
                       : field_ == "dtype"     ? "a text"
                                               : "a list"));
  }

  std::string where_, name_, field_;
  Place place_ = Place::start;
  std::set<std::string> names_, fields_;
};

// The header's length in a file of `size` bytes that begins with `bytes`.
std::size_t header_length(const HeaderReader& header, std::span<const std::byte> bytes, std::size_t size) {
  std::uint64_t length = 0;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.size() > kLengthBytes && text[kLengthBytes] != '{')
    for (const auto& [begin, what] : kOtherFiles)
      if (text.starts_with(begin)) header.refuse(fmt::format("it is {}", what));
  if (size < kLengthBytes)
    header.refuse(fmt::format("it has {} bytes, and the header's length alone takes 8", size));
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kLongestHeader)
    header.refuse(fmt::format("the header's length is given as {} bytes; at most 100 MB are read", length));
  if (length > size - kLengthBytes)
    header.refuse(fmt::format("truncated: the header takes {} bytes, and {} follow its length", length,
                              size - kLengthBytes));
  return length;
}

void read_header(HeaderReader& header, std::span<const std::byte> bytes) {
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  const std::size_t length = bytes.size();
  if (length == 0 || text[0] != '{') header.refuse("the header does not begin with '{'");
  // The JSON reader would take a zero for the end.
  if (const void* zero = std::memchr(text, 0, length))
    header.refuse(
        fmt::format("the header is no JSON at its byte {}", static_cast<const char*>(zero) - text + 1));
  nlohmann::json::sax_parse(text, text + length, &header);
}

[[noreturn]] void cannot_be_read(const std::string& path, const std::string& why) {
  throw UserError(fmt::format("{}: cannot be read: {}", path, why));
}

// Reads the header of a file; returns where the data begin.
std::size_t read_header_of(HeaderReader& header, const InputFile& file) {
  std::vector<std::byte> bytes(std::min<std::size_t>(file.size, 64));
  file.read(0, bytes);
  bytes.resize(header_length(header, bytes, file.size));
  file.read(kLengthBytes, bytes);
  read_header(header, bytes);
  return kLengthBytes + bytes.size();
}

// Sorts the tensors by the order of their data, which fill `size` bytes without holes.
void check_tensors(HeaderReader& header, std::size_t size) {
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorEntry& a, const TensorEntry& b) { return a.offsets < b.offsets; });
  std::uint64_t at = 0;
  for (const TensorEntry& tensor : header.tensors) {
    const std::uint64_t begin = tensor.offsets[0], end = tensor.offsets[1];
    const auto refuse = [&](const std::string& what) {
      header.refuse(fmt::format("tensor {}: {}", quoted_text(tensor.name), what));
    };
    const std::size_t width = dtype_bytes(tensor.dtype);
    if (width == 0) refuse(fmt::format("unknown dtype {}", quoted_text(tensor.dtype)));
    if (begin > end) refuse(fmt::format("data_offsets end before they begin: {}, {}", begin, end));
    const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.shape, width);
    if (!bytes) refuse(fmt::format("the shape {} is beyond any memory", tensor.shape));
    if (*bytes != end - begin)
      refuse(fmt::format("the shape {} of {} takes {} bytes, and data_offsets are for {}", tensor.shape,
                         tensor.dtype, *bytes, end - begin));
    if (begin < at) refuse(fmt::format("its data overlap those of the tensor before it at byte {}", begin));
    if (begin > at) refuse(fmt::format("a hole before its data, from byte {} to {}", at, begin));
    if (end > size) refuse(fmt::format("truncated: its data end at byte {} of {}", end, size));
    at = end;
  }
  if (at < size) header.refuse(fmt::format("{} bytes follow the last tensor's data", size - at));
}

std::string header_json(std::span<const TensorView> tensors, const Metadata& metadata) {
  using Json = nlohmann::ordered_json;
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::uint64_t begin = 0;
  for (const TensorView& tensor : tensors) {
    const std::size_t width = dtype_bytes(tensor.dtype);
    TOPKNOT_CHECK(tensor.name != kMetadata, "a tensor has the name of the metadata");
    TOPKNOT_CHECK(width > 0, fmt::format("tensor '{}': unknown dtype '{}'", tensor.name, tensor.dtype));
    TOPKNOT_CHECK(
        tensor_bytes(tensor.shape, width) == tensor.data.size(),
        fmt::format("tensor '{}': {} bytes for the shape {}", tensor.name, tensor.data.size(), tensor.shape));
    const std::uint64_t end = begin + tensor.data.size();
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  const std::size_t entries = tensors.size() + (metadata.empty() ? 0 : 1);
  TOPKNOT_CHECK(header.size() == entries, "a tensor's name stands twice");
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  TOPKNOT_CHECK(text.size() <= kLongestHeader, "a header longer than 100 MB");
  return text;
}

}  // namespace

std::string quoted_text(const std::string& text) {
  constexpr std::size_t kLongest = 100;
  return nlohmann::json(text.size() > kLongest ? text.substr(0, kLongest) + "..." : text)
      .dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::size_t dtype_bytes(const std::string& dtype) {
  for (const auto& [name, bytes] : kDtypes)
    if (name == dtype) return bytes;
  return 0;
}

std::string non_finite_text(const TensorView& tensor) {
  if (tensor.dtype != "F32") return "";
  const std::size_t size = tensor.data.size() / sizeof(float);
  std::size_t count = 0, first = 0;
  for (std::size_t i = size; i-- > 0;) {
    std::uint32_t bits;
    std::memcpy(&bits, tensor.data.data() + i * sizeof bits, sizeof bits);
    constexpr std::uint32_t kExponent = 0x7f800000;
    if ((bits & kExponent) == kExponent) ++count, first = i;
  }
  return count == 0 ? ""
                    : fmt::format("{} of {} values {} NaN or infinite, the first at index {}", count, size,
                                  count == 1 ? "is" : "are", first);
}

void write_safetensors(const ByteSink& sink, std::span<const TensorView> tensors, const Metadata& metadata) {
  const std::string header = header_json(tensors, metadata);
  const std::uint64_t length = header.size();
  sink(std::as_bytes(std::span(&length, 1)));
  sink(std::as_bytes(std::span(header)));
  for (const TensorView& tensor : tensors)
    if (!tensor.data.empty()) sink(tensor.data);
}

SafetensorsFile SafetensorsFile::parse(std::vector<std::byte> bytes, const std::string& where) {
  SafetensorsFile file;
  file.where_ = where;
  file.bytes_ = std::move(bytes);
  HeaderReader header(where);

  const std::span<const std::byte> content = file.bytes_;
  const std::size_t length = header_length(header, content, content.size());
  read_header(header, content.subspan(kLengthBytes, length));
  const std::span<const std::byte> data = content.subspan(kLengthBytes + length);
  check_tensors(header, data.size());
  for (TensorEntry& tensor : header.tensors) {
    file.index_[tensor.name] = file.tensors_.size();
    file.tensors_.push_back({std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape),
                             data.subspan(tensor.offsets[0], tensor.offsets[1] - tensor.offsets[0])});
  }
  file.metadata_ = std::move(header.metadata);
  return file;
}

SafetensorsFile SafetensorsFile::read(const std::string& path) {
  const InputFile file(path);
  std::vector<std::byte> bytes;
  try {
    bytes.resize(file.size);
  } catch (const std::exception&) {
    const std::string size = format_bytes(static_cast<double>(file.size));
    cannot_be_read(path, fmt::format("its {} do not fit in memory", size));
  }
  file.read(0, bytes);
  return parse(std::move(bytes), path);
}

Metadata SafetensorsFile::read_metadata(const std::string& path) {
  HeaderReader header(path);
  read_header_of(header, InputFile(path));
  return std::move(header.metadata);
}

const TensorView* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

InputFile::InputFile(const std::string& name) : path(name), file(open_regular_file(name)) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0) cannot_be_read(path, errno_text());
  size = static_cast<std::size_t>(status.st_size);
}

void InputFile::read(std::size_t begin, std::span<std::byte> out) const {
  while (!out.empty()) {
    errno = 0;
    const ssize_t n =
        pread(file.get(), out.data(), std::min(out.size(), std::size_t{1} << 30), static_cast<off_t>(begin));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) cannot_be_read(path, errno_text());
    if (n == 0) cannot_be_read(path, "it became shorter while it was read");
    begin += static_cast<std::size_t>(n);
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

// Padded with spaces: as long for any number of steps.
std::string GradientsWriter::header() const {
  constexpr std::uint64_t kLength = 120;
  const std::string json = fmt::format(R"({{"{}":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})",
                                       kGradients, steps_, size_, steps_ * size_ * sizeof(float));
  return std::string(reinterpret_cast<const char*>(&kLength), kLengthBytes) +
         fmt::format("{:<{}}", json, kLength);
}

GradientsReader::GradientsReader(const std::string& path) : file_(path) {
  HeaderReader header(path);
  data_begin_ = read_header_of(header, file_);
  check_tensors(header, file_.size - data_begin_);
  if (header.tensors.size() != 1 || header.tensors[0].name != kGradients ||
      header.tensors[0].dtype != "F32" || header.tensors[0].shape.size() != 2)
    throw UserError(fmt::format(
        "{}: holds no recorded gradients, which are one tensor '{}', F32 [steps, size]", path, kGradients));
  steps_ = static_cast<std::size_t>(header.tensors[0].shape[0]);
  size_ = static_cast<std::size_t>(header.tensors[0].shape[1]);
}

void GradientsReader::read(std::size_t begin, std::span<float> out) const {
  TOPKNOT_CHECK(begin + out.size() <= steps_ * size_, "values that were not recorded");
  file_.read(data_begin_ + begin * sizeof(float), std::as_writable_bytes(out));
}

}  // namespace topknot
