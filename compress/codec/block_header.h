#pragma once
// The numbers of a block's header (compress/codec/codec.h), for the CPU and for
// kernels. C++17.

#include <cstddef>
#include <cstdint>

namespace topknot {

struct BlockHeader {
  static constexpr std::uint32_t kMagic = 0x544B4E54;
  static constexpr std::uint8_t kVersion = 1, kFiniteFlag = 1;

  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion, flags = 0, index_codec = 0, value_codec = 0;
  std::uint32_t numel = 0, count = 0;
};
static_assert(sizeof(BlockHeader) == 16);

}  // namespace topknot
