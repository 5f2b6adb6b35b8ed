#include "compress/quantise/random.h"

#include <algorithm>

#include "nn/core/rng.h"
#include "nn/core/simd.h"

namespace topknot::quantise {
namespace {

constexpr std::size_t kBlocks = 16;  // of four numbers each

// Philox4x32-10 as in nn/core/rng.h, for kBlocks counters from `block` on.
TOPKNOT_MULTIVERSION void make_blocks(std::uint32_t key0, std::uint32_t key1, std::uint32_t a,
                                      std::uint32_t b, std::uint64_t block, float* out) {
  std::uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (std::size_t i = 0; i < kBlocks; ++i) {
    c0[i] = static_cast<std::uint32_t>(block + i);
    c1[i] = static_cast<std::uint32_t>((block + i) >> 32);
    c2[i] = a;
    c3[i] = b;
  }
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const std::uint64_t x = std::uint64_t{0xD2511F53u} * c0[i], y = std::uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<std::uint32_t>(y >> 32) ^ c1[i] ^ key0;
      c2[i] = static_cast<std::uint32_t>(x >> 32) ^ c3[i] ^ key1;
      c1[i] = static_cast<std::uint32_t>(y);
      c3[i] = static_cast<std::uint32_t>(x);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const std::uint32_t* words[4] = {c0, c1, c2, c3};
  // 24 bits fit a signed integer, whose conversion is the cheaper one.
  for (std::size_t w = 0; w < 4; ++w)
    for (std::size_t i = 0; i < kBlocks; ++i)
      out[4 * i + w] = static_cast<float>(static_cast<std::int32_t>(words[w][i] >> 8)) * 0x1p-24f;
}

}  // namespace

void uniforms(std::uint64_t seed, std::int64_t step, int rank, std::uint64_t first, std::size_t count,
              float* out) {
  const auto key0 = static_cast<std::uint32_t>(seed);
  const auto key1 =
      static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(RngUse::compress) << 24);
  const auto a = static_cast<std::uint32_t>(step), b = static_cast<std::uint32_t>(rank);
  float numbers[4 * kBlocks];
  for (std::size_t i = 0; i < count;) {
    const std::uint64_t block = (first + i) / 4;
    const std::size_t skip = (first + i) % 4, take = std::min(count - i, 4 * kBlocks - skip);
    make_blocks(key0, key1, a, b, block, numbers);
    std::copy_n(numbers + skip, take, out + i);
    i += take;
  }
}

}  // namespace topknot::quantise
