#include "train/metrics/npy_header.h"

#include <charconv>
#include <limits>

#include "nn/core/base/check.h"

namespace topknot {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

// "int64 ('<i8')": what NumPy calls the type that a descr such as "<i8" means.
std::string type_name(const std::string& descr) {
  std::string name;
  const char kind = descr.size() > 1 ? descr[1] : ' ';
  const std::string size = descr.size() > 2 ? descr.substr(2) : "";
  const auto bits = [&] {
    int bytes = 0;
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
  [[noreturn]] void refuse(const std::string& what) const { throw UserError(path_ + ": " + what); }
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

}  // namespace

NpyHeader parse_npy_header(const std::string& path, std::string_view start, std::size_t file_size) {
  const auto refuse = [&](const std::string& what) { throw UserError(path + ": " + what); };
  const auto byte = [&](std::size_t at) {
    return static_cast<std::size_t>(static_cast<unsigned char>(start[at]));
  };
  if (start.starts_with("PK\x03\x04")) refuse("is an .npz archive; save the one array with numpy.save");
  if (!start.starts_with(kMagic.substr(0, std::min(kMagic.size(), start.size()))) || start.empty())
    refuse("is no .npy file; numpy.save writes one");
  if (start.size() < 10) refuse("is truncated inside the header; save it again");
  const std::size_t major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0)
    refuse("has .npy version " + std::to_string(major) + "." + std::to_string(minor) +
           "; 1.0, 2.0 and 3.0 are read");
  NpyHeader header;
  std::size_t length = byte(8) | byte(9) << 8, prefix = 10;
  if (major > 1) {
    prefix = 12;
    if (start.size() < prefix) refuse("is truncated inside the header; save it again");
    length |= byte(10) << 16 | byte(11) << 24;
  }
  header.data_begin = prefix + length;
  if (header.data_begin > file_size) refuse("is truncated inside the header; save it again");
  if (header.data_begin > kNpyLongestStart) refuse("has a damaged header (its length); save it again");
  Parser(path, start.substr(prefix, length)).parse(header);
  return header;
}

std::string npy_header(const std::string& descr, const std::vector<std::size_t>& shape) {
  std::string dimensions;
  for (std::size_t i = 0; i < shape.size(); ++i)
    dimensions += std::to_string(shape[i]) + (i + 1 < shape.size() ? ", " : shape.size() == 1 ? "," : "");
  std::string text = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + dimensions + "), }";
  // Room for the longest first dimension, then up to a multiple of 64 bytes with the newline, as NumPy aligns.
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

std::string npy_shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace topknot
