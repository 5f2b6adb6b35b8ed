#pragma once
// Named tensors in safetensors files (https://github.com/huggingface/safetensors, "Format"): a length N (8
// bytes, little-endian), a JSON header of N bytes with every tensor's dtype, shape and data_offsets, and
// optional texts under "__metadata__"; then the tensors' bytes, without holes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "train/metrics/output_file.h"

namespace topknot {

struct TensorView {
  std::string name;
  std::string dtype;  // "F32", "F64", "U8", "I64", "U64", "BF16", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // little-endian, C order; not owned, any alignment
};

using Metadata = std::map<std::string, std::string>;
using ByteSink = std::function<void(std::span<const std::byte>)>;

// A text from a file for a message: quoted, at most 100 bytes of it, without what a terminal would interpret.
std::string quoted_text(const std::string& text);

// Bytes of one element; 0 for an unknown dtype.
std::size_t dtype_bytes(const std::string& dtype);

// "3 of 640 values are NaN or infinite, the first at index 17" (in C order) of an F32 tensor, else "".
std::string non_finite_text(const TensorView& tensor);

// Header and data, in the given order, in several calls of `sink`. The data begin at a multiple of 8 bytes.
// Names are distinct, and data have the length of shape and dtype. Invalid UTF-8 becomes U+FFFD.
void write_safetensors(const ByteSink& sink, std::span<const TensorView> tensors,
                       const Metadata& metadata = {});

// A file in memory, which holds the bytes that its views show. Throws UserError, which names the file and the
// first violation of the format; nothing is ignored or repaired.
class SafetensorsFile {
 public:
  // `where` names the file in messages.
  static SafetensorsFile parse(std::vector<std::byte> bytes, const std::string& where);
  static SafetensorsFile read(const std::string& path);
  // Reads the header alone, however large the file is.
  static Metadata read_metadata(const std::string& path);

  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  const std::string& where() const { return where_; }
  const std::vector<TensorView>& tensors() const { return tensors_; }  // in the order of their data
  const TensorView* find(const std::string& name) const;               // null: there is none
  const Metadata& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;

  std::string where_;
  std::vector<std::byte> bytes_;
  std::vector<TensorView> tensors_;
  std::map<std::string, std::size_t> index_;  // of tensors_, by name
  Metadata metadata_;
};

// A regular file, read by position from any number of threads. Throws UserError if it cannot be read.
struct InputFile {
  explicit InputFile(const std::string& name);
  void read(std::size_t begin, std::span<std::byte> out) const;

  const std::string path;
  const Fd file;
  std::size_t size = 0;
};

// Recorded gradients: the tensor "gradients", F32 [steps, size], alone in a file. The file appears when it is
// closed. Throws UserError if it cannot be written.
class GradientsWriter {
 public:
  GradientsWriter(const std::string& path, std::size_t size) : file_(path), size_(size) {
    file_.write(header());
  }
  void append(std::span<const float> gradient) {
    TOPKNOT_CHECK(gradient.size() == size_, "a gradient of another size");
    file_.write({reinterpret_cast<const char*>(gradient.data()), gradient.size_bytes()});
    ++steps_;
  }
  // Called once, with the steps that there are.
  void close() {
    file_.rewrite_begin(header());
    file_.close();
  }

 private:
  std::string header() const;

  OutputFile file_;
  const std::size_t size_;
  std::size_t steps_ = 0;
};

// Reads what GradientsWriter wrote, by position: the file may be larger than memory.
class GradientsReader {
 public:
  // Reads all but the values. Throws UserError as SafetensorsFile does, and if the file holds anything else.
  explicit GradientsReader(const std::string& path);

  std::size_t steps() const { return steps_; }
  std::size_t size() const { return size_; }
  // The values [begin, begin + out.size()) of all steps in a row. Throws UserError if they cannot be read.
  void read(std::size_t begin, std::span<float> out) const;

 private:
  const InputFile file_;
  std::size_t data_begin_ = 0, steps_ = 0, size_ = 0;
};

}  // namespace topknot
