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

// "3 of 640 values are NaN or infinite, the first at index 17" of an F32 tensor (in C order, from 0); "" if
// all are finite and for other types.
std::string non_finite_text(const TensorView& tensor);

// Header and data, in the given order, in several calls of `sink`. The data begin at a multiple of 8 bytes.
// Names are distinct, and data have the length of shape and dtype. Invalid UTF-8 in texts is replaced by
// U+FFFD.
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

}  // namespace topknot
