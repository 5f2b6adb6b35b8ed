#pragma once
// Bits one after another, in each byte from the lowest up.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace topknot {

class BitWriter {
 public:
  explicit BitWriter(std::byte* out) : out_(out) {}
  void put(std::uint64_t value, unsigned bits) {  // bits at most 32
    buffer_ |= value << filled_;
    filled_ += bits;
    if (filled_ < 32) return;
    const auto word = static_cast<std::uint32_t>(buffer_);
    std::memcpy(out_, &word, sizeof word);
    out_ += sizeof word;
    buffer_ >>= 32;
    filled_ -= 32;
  }
  void zeros(std::uint64_t count) {
    for (; count > 32; count -= 32) put(0, 32);
    put(0, static_cast<unsigned>(count));
  }
  void flush() {
    for (; filled_ > 0; filled_ -= std::min(filled_, 8u), buffer_ >>= 8)
      *out_++ = static_cast<std::byte>(buffer_);
  }

 private:
  std::byte* out_;
  std::uint64_t buffer_ = 0;
  unsigned filled_ = 0;  // below 32 between calls
};

class BitReader {
 public:
  BitReader(const std::byte* at, const std::byte* end) : at_(at), end_(end) {}

  // Zeros up to the next one, which is taken as well. False if the bytes end before it.
  bool unary(std::uint64_t& zeros) {
    zeros = 0;
    for (;;) {
      refill();
      if (buffer_ != 0) {
        const auto run = static_cast<unsigned>(std::countr_zero(buffer_));
        take(run + 1);
        zeros += run;
        return true;
      }
      if (left_ == 0) return false;
      zeros += left_;
      left_ = 0;
    }
  }
  // At most 32 bits; false if there are fewer.
  bool get(unsigned bits, std::uint64_t& value) {
    if (left_ < bits) refill();
    if (left_ < bits) return false;
    value = buffer_ & ((std::uint64_t{1} << bits) - 1);
    take(bits);
    return true;
  }
  // Whether what is left is less than a byte, and zero.
  bool done() const { return at_ == end_ && left_ < 8 && buffer_ == 0; }

 private:
  void take(unsigned bits) {
    buffer_ = bits < 64 ? buffer_ >> bits : 0;
    left_ -= bits;
  }
  // To more than 56 bits, as long as there are bytes. Bits above left_ are zero.
  void refill() {
    if (left_ > 32) return;
    if (end_ - at_ >= 4) {
      std::uint32_t word = 0;
      std::memcpy(&word, at_, sizeof word);
      buffer_ |= std::uint64_t{word} << left_;
      at_ += sizeof word;
      left_ += 32;
      return;
    }
    for (; left_ <= 56 && at_ != end_; left_ += 8) buffer_ |= std::to_integer<std::uint64_t>(*at_++) << left_;
  }

  const std::byte *at_, *end_;
  std::uint64_t buffer_ = 0;
  unsigned left_ = 0;  // valid bits of buffer_
};

}  // namespace topknot
