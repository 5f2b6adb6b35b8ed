#pragma once
// What compression saves, in bytes: the one definition that metrics and reports share. Payload of the collectives
// with the blocks' headers, without the transport's framing.

#include <cstdint>

namespace topknot {

// Bytes of a step or of many, of one rank or of all.
struct ByteCount {
  std::uint64_t upload = 0;
  std::uint64_t download = 0;  // from all other ranks; an all-reduce counts its length once
  std::uint64_t dense = 0;     // what the same gradients take as floats: 4 d

  ByteCount& operator+=(const ByteCount& other) {
    upload += other.upload;
    download += other.download;
    dense += other.dense;
    return *this;
  }
  // The true ratio, dense / upload. 0 where nothing was sent.
  double ratio() const {
    return upload == 0 ? 0.0 : static_cast<double>(dense) / static_cast<double>(upload);
  }
};

}  // namespace topknot
