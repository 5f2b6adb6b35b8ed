#pragma once
// Arrays in NumPy's .npy files: the magic bytes "\x93NUMPY", version, header length, the header (a Python
// dictionary: descr, fortran_order, shape), then the elements (NumPy's documentation, numpy.lib.format). Read
// are versions 1.0, 2.0 and 3.0, float32 and float64, little-endian, C order; written is version 1.0.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "nn/base/file.h"

namespace topknot {

// Opens an array and checks all of it but the elements: header, type, order, and the file's length to the
// byte. Elements are read when they are asked for, so a file may be larger than memory. Throws UserError that
// names the file and what is wrong with it.
class NpyReader {
 public:
  explicit NpyReader(const std::string& path);

  const std::vector<std::size_t>& shape() const { return shape_; }
  bool is_double() const { return is_double_; }
  std::size_t numel() const { return numel_; }

  // The elements [begin, begin + out.size()) in C order, rounded to float if the file holds float64 (what
  // is beyond float's range becomes an infinity), or widened. Throws UserError if the file cannot be read
  // or has become shorter.
  void read(std::size_t begin, std::span<float> out) const;
  void read(std::size_t begin, std::span<double> out) const;

 private:
  template <class Stored, class T>
  void convert(std::size_t begin, std::span<T> out) const;
  void read_bytes(std::size_t begin, std::span<std::byte> out) const;

  std::string path_;
  Fd file_;
  std::vector<std::size_t> shape_;
  bool is_double_ = false;
  std::size_t numel_ = 0, data_begin_ = 0;
};

// Writes a whole array; values.size() is the product of the shape (1 for the empty shape). Throws UserError
// with path and reason where it cannot be written.
void write_npy(const std::string& path, const std::vector<std::size_t>& shape, std::span<const float> values);
void write_npy(const std::string& path, const std::vector<std::size_t>& shape,
               std::span<const double> values);

// Writes an array [T, row...] row by row; T is put into the header by close(). A file that was never closed
// is refused by readers, because its header says T = 0. Throws UserError as above.
class NpyWriter {
 public:
  NpyWriter(const std::string& path, const std::vector<std::size_t>& row_shape);
  void append(std::span<const float> row);
  void close();  // once; nothing can be appended afterwards

 private:
  std::string path_;
  std::vector<std::size_t> shape_;  // the first entry counts the rows
  std::size_t row_numel_ = 1;
  Fd file_;
};

std::string npy_shape_text(const std::vector<std::size_t>& shape);  // "[3, 4]"

}  // namespace topknot
