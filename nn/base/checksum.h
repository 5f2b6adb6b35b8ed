#pragma once
// A checksum of bytes that come in pieces.

#include <cstddef>
#include <cstdint>
#include <span>

namespace topknot {

// A 64-bit hash of bytes that come in pieces: FNV-1a by words of 8 bytes, mixed after each word. It finds accidents, not
// forgery: any change of one word changes it.
class Checksum {
 public:
  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  void word(std::uint64_t value);
  std::uint64_t hash_ = 0xcbf29ce484222325u, length_ = 0;
  std::byte tail_[8] = {};
  std::size_t tail_size_ = 0;
};

}  // namespace topknot
