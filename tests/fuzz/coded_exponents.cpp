// Floats with coded exponents. The format has no positions and no forbidden values: what a reader takes need only have
// been written within its memory, which the sanitizers see, and the writer must take it.
#include <bit>
#include <cstring>

#include "compress/codec/exponents.h"
#include "nn/base/check.h"
#include "tests/fuzz/fuzz_target.h"

namespace topknot::fuzz {
namespace {

template <class T>
T value_of(std::uint32_t bits) {
  if constexpr (sizeof(T) == sizeof(float))
    return std::bit_cast<float>(bits);
  else
    return {std::uint16_t(bits >> 16)};
}

template <class T>
Sample make(Random& random) {
  Sample sample;
  sample.numel = random.below(random.one_in(64) ? 9000 : 150);
  const unsigned first = random.below(256), spread = 1 + random.below(random.one_in(4) ? 256 : 12);
  const unsigned zeros = random.below(4);
  std::vector<T> values(sample.numel);
  for (T& value : values) {
    const std::uint32_t exponent =
        random.one_in(50) ? random.below(256) : (first + random.below(spread)) & 0xFF;
    if (random.below(4) >= zeros)
      value = value_of<T>(exponent << 23 | (std::uint32_t(random.bits()) & 0x807FFFFF));
  }
  encode_exponents(std::span<const T>(values), sample.block);
  return sample;
}

template <class T>
bool accept(std::span<const std::byte> block, std::size_t numel) {
  std::vector<T> values(numel);
  try {
    decode_exponents(block, std::span<T>(values));
  } catch (const Error&) {
    return false;
  }
  Block again;
  encode_exponents(std::span<const T>(values), again);
  std::vector<T> back(numel);
  decode_exponents(again, std::span<T>(back));
  require(numel == 0 || std::memcmp(back.data(), values.data(), numel * sizeof(T)) == 0,
          "values that come back");
  return true;
}

const bool added = [] {
  fuzz_targets().add("exponents", "floats with coded exponents", {make<float>, accept<float>});
  fuzz_targets().add("exponents/bf16", "bfloat16 with coded exponents", {make<BFloat16>, accept<BFloat16>});
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
