#include "train/metrics/npy.h"

#include <fmt/ranges.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie");

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw UserError(path + ": " + what);
}

constexpr std::string_view kMagic = "\x93NUMPY";
// No more than so many bytes of a file are read as its header. Real ones take 128.
constexpr std::size_t kLongestStart = 1 << 20;

struct NpyHeader {
  bool is_double = false;
  std::vector<std::size_t> shape;
  std::size_t data_begin = 0;  // bytes before the elements
};

// "int64 ('<i8')": what NumPy calls the type that a descr such as "<i8" means.
std::string type_name(const std::string& descr) {
  std::string name;
  const char kind = descr.size() > 1 ? descr[1] : ' ';
  const std::string size = descr.size() > 2 ? descr.substr(2) : "";
  const auto bits = [&] {
    std::uint64_t bytes = 0;
    std::from_chars(size.data(), size.data() + size.size(), bytes);
    return std::to_string(8 * bytes);
  };
  switch (kind) {
    case 'f':
      name = "float" + bits();
      break;
    case 'i':
      name = "int" + bits();
      break;
    case 'u':
      name = "uint" + bits();
      break;
    case 'c':
      name = "complex" + bits();
      break;
    case 'b':
      name = "bool";
      break;
    case 'O':
      name = "Python objects";
      break;
    case 'U':
    case 'S':
      name = "text";
      break;
    case 'V':
      name = "raw bytes (bfloat16 saved without its name?)";
      break;
    default:
      return "'" + descr + "'";
  }
  if (descr[0] == '>') name = "big-endian " + name;
  return name + " ('" + descr + "')";
}

// The dictionary {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }: the part of Python that NumPy
// writes, in any order and spacing.
class Parser {
 public:
  Parser(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  void parse(NpyHeader& header) {
    expect('{');
    bool descr = false, order = false, shape = false;
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !descr) {
        descr = true;
        type(header);
      } else if (key == "fortran_order" && !order) {
        order = true;
        if (word() == "True")
          refuse(
              "is in Fortran (column) order; save it in C order: numpy.save(file, "
              "numpy.ascontiguousarray(x))");
      } else if (key == "shape" && !shape) {
        shape = true;
        dimensions(header.shape);
      } else {
        damaged("key '" + key + "'");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip();
    if (at_ < text_.size()) damaged("text after the dictionary");
    if (!descr || !order || !shape) damaged("descr, fortran_order or shape is missing");
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { topknot::refuse(path_, what); }
  [[noreturn]] void damaged(const std::string& what) const {
    refuse("has a damaged header (" + what + "); save it again");
  }

  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool accept(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) damaged(std::string("'") + c + "' is missing");
  }

  std::string quoted() {
    skip();
    const char quote = at_ < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') damaged("a quoted word is missing");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) damaged("a quote without its partner");
    std::string result(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return result;
  }

  std::string word() {
    for (const char* known : {"True", "False"})
      if (skip(); text_.substr(at_).starts_with(known)) {
        at_ += std::string_view(known).size();
        return known;
      }
    damaged("fortran_order is neither True nor False");
  }

  void type(NpyHeader& header) {
    skip();
    if (at_ < text_.size() && text_[at_] == '[')
      refuse("holds a structured type; float32 and float64 are read: save one field of it");
    const std::string descr = quoted();
    header.is_double = descr == "<f8" || descr == "=f8";
    if (header.is_double || descr == "<f4" || descr == "=f4") return;
    refuse("holds " + type_name(descr) +
           "; little-endian float32 and float64 are read: numpy.save(file, x.astype('<f4'))");
  }

  void dimensions(std::vector<std::size_t>& shape) {
    expect('(');
    while (!accept(')')) {
      skip();
      std::size_t n = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), n);
      if (error != std::errc{}) damaged("the shape");
      at_ = static_cast<std::size_t>(end - text_.data());
      accept('L');  // Python 2
      shape.push_back(n);
      if (shape.size() > 64) damaged("the shape");  // NumPy has 64 dimensions at most
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
  }

  const std::string& path_;
  std::string_view text_;
  std::size_t at_ = 0;
};

// `start` are the file's first bytes, up to kLongestStart; `file_size` its length. Throws UserError, which
// names `path` and what is wrong: no .npy file, an unknown version, damaged, a type other than little-endian
// float32 and float64 (by name), Fortran order.
NpyHeader parse_npy_header(const std::string& path, std::string_view start, std::size_t file_size) {
  const auto byte = [&](std::size_t at) {
    return static_cast<std::size_t>(static_cast<unsigned char>(start[at]));
  };
  if (start.starts_with("PK\x03\x04")) refuse(path, "is an .npz archive; save the one array with numpy.save");
  if (!start.starts_with(kMagic.substr(0, std::min(kMagic.size(), start.size()))) || start.empty())
    refuse(path, "is no .npy file; numpy.save writes one");
  if (start.size() < 10) refuse(path, "is truncated inside the header; save it again");
  const std::size_t major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0)
    refuse(path, fmt::format("has .npy version {}.{}; 1.0, 2.0 and 3.0 are read", major, minor));
  NpyHeader header;
  std::size_t length = byte(8) | byte(9) << 8, prefix = 10;
  if (major > 1) {
    prefix = 12;
    if (start.size() < prefix) refuse(path, "is truncated inside the header; save it again");
    length |= byte(10) << 16 | byte(11) << 24;
  }
  header.data_begin = prefix + length;
  if (header.data_begin > file_size) refuse(path, "is truncated inside the header; save it again");
  if (header.data_begin > kLongestStart) refuse(path, "has a damaged header (its length); save it again");
  Parser(path, start.substr(prefix, length)).parse(header);
  return header;
}

// Magic, version 1.0, length and dictionary, padded so that any first dimension takes the same bytes.
std::string npy_header(const std::string& descr, const std::vector<std::size_t>& shape) {
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr,
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // Room for the longest first dimension, then up to a multiple of 64 bytes with the newline, as NumPy
  // aligns.
  const std::size_t first = shape.empty() ? 0 : std::to_string(shape[0]).size();
  const std::size_t room = std::numeric_limits<std::size_t>::digits10 + 1 - first;
  const std::size_t total = (kMagic.size() + 4 + text.size() + room + 1 + 63) / 64 * 64;
  text.append(total - (kMagic.size() + 4) - text.size() - 1, ' ');
  text += '\n';
  TOPKNOT_CHECK(text.size() < 65536, "a shape too long for version 1.0");
  std::string header(kMagic);
  header += {'\1', '\0', static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)};
  return header + text;
}

// The product; nullopt if it does not fit.
std::optional<std::size_t> npy_numel(const std::vector<std::size_t>& shape) {
  for (const std::size_t n : shape)
    if (n == 0) return 0;
  std::size_t numel = 1;
  for (const std::size_t n : shape) {
    if (numel > std::numeric_limits<std::size_t>::max() / n) return std::nullopt;
    numel *= n;
  }
  return numel;
}

// Bytes read, fewer at the end of the file; -1 on an error.
ssize_t read_at(int file, std::byte* out, std::size_t size, std::size_t offset) {
  std::size_t done = 0;
  while (done < size) {
    const ssize_t n = pread(file, out + done, std::min(size - done, std::size_t{1} << 30),
                            static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return static_cast<ssize_t>(done);
}

void write_all(int file, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(file, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) refuse(path, "cannot be written: " + errno_text() + "; free space or choose another place");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

Fd create(const std::string& path) {
  errno = 0;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) refuse(path, "cannot be written: " + errno_text() + "; choose another place");
  return Fd(file);
}

void write_header(int file, const std::string& path, const char* descr,
                  const std::vector<std::size_t>& shape) {
  const std::string header = npy_header(descr, shape);
  write_all(file, path, std::as_bytes(std::span(header)));
}

// close() reports the delayed errors of a full disk or a lost server.
void close_checked(Fd& file, const std::string& path) {
  errno = 0;
  if (::close(file.release()) != 0) refuse(path, "cannot be written: " + errno_text());
}

template <class T>
void write_array(const std::string& path, const std::vector<std::size_t>& shape, std::span<const T> values) {
  TOPKNOT_CHECK(npy_numel(shape) == values.size(), "as many values as the shape has");
  Fd file = create(path);
  write_header(file.get(), path, std::is_same_v<T, double> ? "<f8" : "<f4", shape);
  write_all(file.get(), path, std::as_bytes(values));
  close_checked(file, path);
}

}  // namespace

NpyReader::NpyReader(const std::string& path) : path_(path), file_(open_regular_file(path)) {
  struct stat status {};
  if (fstat(file_.get(), &status) != 0) refuse(path, "cannot be read: " + errno_text());
  const auto size = static_cast<std::size_t>(status.st_size);

  std::string start(std::min(size, kLongestStart), '\0');
  if (read_at(file_.get(), reinterpret_cast<std::byte*>(start.data()), start.size(), 0) !=
      static_cast<ssize_t>(start.size()))
    refuse(path, "cannot be read: " + errno_text());
  const NpyHeader header = parse_npy_header(path, start, size);
  shape_ = header.shape;
  is_double_ = header.is_double;
  data_begin_ = header.data_begin;

  const std::size_t width = is_double_ ? sizeof(double) : sizeof(float);
  const std::optional<std::size_t> numel = npy_numel(shape_);
  if (!numel || *numel > (std::numeric_limits<std::int64_t>::max() - data_begin_) / width)
    refuse(path, "has a shape " + npy_shape_text(shape_) + " beyond any memory; the header is damaged");
  numel_ = *numel;
  const std::size_t expected = data_begin_ + numel_ * width;
  const std::string shape = npy_shape_text(shape_);
  if (size < expected)
    refuse(path, fmt::format("is truncated: shape {} takes {} bytes and there are {}; save it again", shape,
                             expected, size));
  if (size > expected)
    refuse(
        path,
        fmt::format("has {} bytes more than its shape {} takes; was it being written, or were several arrays "
                    "saved into one file?",
                    size - expected, shape));
}

void NpyReader::read_bytes(std::size_t begin, std::span<std::byte> out) const {
  errno = 0;
  const ssize_t got = read_at(file_.get(), out.data(), out.size(), data_begin_ + begin);
  if (got < 0) refuse(path_, "cannot be read: " + errno_text());
  if (static_cast<std::size_t>(got) < out.size()) refuse(path_, "became shorter while it was read");
}

template <class Stored, class T>
void NpyReader::convert(std::size_t begin, std::span<T> out) const {
  if constexpr (std::is_same_v<Stored, T>) {
    read_bytes(begin * sizeof(T), std::as_writable_bytes(out));
  } else {
    std::vector<Stored> buffer(std::min<std::size_t>(out.size(), 1 << 16));
    for (std::size_t at = 0; at < out.size(); at += buffer.size()) {
      const auto part = std::span(buffer).first(std::min(buffer.size(), out.size() - at));
      read_bytes((begin + at) * sizeof(Stored), std::as_writable_bytes(part));
      std::transform(part.begin(), part.end(), out.begin() + static_cast<std::ptrdiff_t>(at),
                     [](Stored x) { return static_cast<T>(x); });
    }
  }
}

void NpyReader::read(std::size_t begin, std::span<float> out) const {
  TOPKNOT_CHECK(begin <= numel_ && out.size() <= numel_ - begin, "elements outside the array");
  is_double_ ? convert<double>(begin, out) : convert<float>(begin, out);
}

void NpyReader::read(std::size_t begin, std::span<double> out) const {
  TOPKNOT_CHECK(begin <= numel_ && out.size() <= numel_ - begin, "elements outside the array");
  is_double_ ? convert<double>(begin, out) : convert<float>(begin, out);
}

void write_npy(const std::string& path, const std::vector<std::size_t>& shape,
               std::span<const float> values) {
  write_array(path, shape, values);
}

void write_npy(const std::string& path, const std::vector<std::size_t>& shape,
               std::span<const double> values) {
  write_array(path, shape, values);
}

NpyWriter::NpyWriter(const std::string& path, const std::vector<std::size_t>& row_shape)
    : path_(path), shape_(row_shape), file_(create(path)) {
  for (const std::size_t n : row_shape) row_numel_ *= n;
  shape_.insert(shape_.begin(), 0);
  write_header(file_.get(), path_, "<f4", shape_);
}

void NpyWriter::append(std::span<const float> row) {
  TOPKNOT_CHECK(file_.get() >= 0, "append() after close()");
  TOPKNOT_CHECK(row.size() == row_numel_, "a row of another length");
  write_all(file_.get(), path_, std::as_bytes(row));
  ++shape_[0];
}

void NpyWriter::close() {
  TOPKNOT_CHECK(file_.get() >= 0, "close() twice");
  errno = 0;
  if (lseek(file_.get(), 0, SEEK_SET) != 0) refuse(path_, "cannot be written: " + errno_text());
  write_header(file_.get(), path_, "<f4", shape_);
  close_checked(file_, path_);
}

std::string npy_shape_text(const std::vector<std::size_t>& shape) {
  return fmt::format("{}", shape);
}

}  // namespace topknot
