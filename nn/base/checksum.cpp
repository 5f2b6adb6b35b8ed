#include "nn/base/checksum.h"

#include <algorithm>
#include <cstring>

namespace topknot {

void Checksum::word(std::uint64_t value) {
  hash_ = (hash_ ^ value) * 0x100000001b3u;
  hash_ ^= hash_ >> 29;  // high bits would otherwise reach higher ones only
}

void Checksum::update(std::span<const std::byte> bytes) {
  length_ += bytes.size();
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  const auto fill = [&](std::size_t size) {
    if (size > 0) std::memcpy(tail_ + tail_size_, at, size);
    tail_size_ += size, at += size, left -= size;
  };
  std::uint64_t value;
  if (tail_size_ > 0) {
    fill(std::min(left, sizeof tail_ - tail_size_));
    if (tail_size_ < sizeof tail_) return;
    std::memcpy(&value, tail_, sizeof value);
    word(value);
    tail_size_ = 0;
  }
  for (; left >= sizeof value; at += sizeof value, left -= sizeof value) {
    std::memcpy(&value, at, sizeof value);
    word(value);
  }
  fill(left);
}

std::uint64_t Checksum::value() const {
  Checksum end = *this;
  std::uint64_t last = 0;
  std::memcpy(&last, tail_, tail_size_);
  end.word(last);
  end.word(length_);
  return end.hash_;
}

}  // namespace topknot
