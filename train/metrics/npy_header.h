#pragma once
// The header of a .npy file, as text; for train/metrics/npy.cpp and its tests.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

struct NpyHeader {
  bool is_double = false;
  std::vector<std::size_t> shape;
  std::size_t data_begin = 0;  // bytes before the elements
};

// No more than so many bytes of a file are read as its header. Real ones take 128.
inline constexpr std::size_t kNpyLongestStart = 1 << 20;

// `start` are the file's first bytes, up to kNpyLongestStart; `file_size` its length. Throws UserError, which
// names `path` and what is wrong: no .npy file, an unknown version, damaged, a type other than little-endian
// float32 and float64 (by name), Fortran order.
NpyHeader parse_npy_header(const std::string& path, std::string_view start, std::size_t file_size);

// Magic, version 1.0, length and dictionary, padded so that any first dimension takes the same bytes.
std::string npy_header(const std::string& descr, const std::vector<std::size_t>& shape);

// The product; nullopt where it does not fit.
std::optional<std::size_t> npy_numel(const std::vector<std::size_t>& shape);
std::string npy_shape_text(const std::vector<std::size_t>& shape);  // "[3, 4]"

}  // namespace topknot
