// 8 bits per value. Blocks of 256 values have one float32 scale each, their largest magnitude a: q = nearest
// integer to 127 x / a, value = q a / 127, computed in double. First the scales, then the q. A block whose a
// is below 2^-119 is sent as zeros: q a / 127 would leave the normal range, where distinct q coincide.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

using int8::kBlock;

TOPKNOT_MULTIVERSION float block_scale(const float* values, std::size_t n) {
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return int8::scale_of(largest);
}

TOPKNOT_MULTIVERSION void to_int8(const float* values, std::size_t n, double factor, std::int8_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = int8::encode(values[i], factor);
}

// Returns the largest |q|.
TOPKNOT_MULTIVERSION std::int32_t from_int8(const std::int8_t* in, std::size_t n, double scale,
                                            float* values) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t q = in[i], magnitude = q < 0 ? -q : q;
    values[i] = int8::decode(in[i], scale);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

class Int8ValueCode final : public ValueCodec {
 public:
  std::uint8_t id() const override { return 3; }
  bool exact() const override { return false; }
  std::size_t bytes(std::size_t count) const override {
    return (count + kBlock - 1) / kBlock * sizeof(float) + count;
  }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    const std::size_t head = out.size();
    out.resize(head + bytes(values.size()));
    std::byte* const scales = out.data() + head;
    auto* const codes = reinterpret_cast<std::int8_t*>(scales + bytes(values.size()) - values.size());
    for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
      const std::size_t n = std::min(kBlock, values.size() - begin);
      const float scale = block_scale(values.data() + begin, n);
      std::memcpy(scales + begin / kBlock * sizeof scale, &scale, sizeof scale);
      to_int8(values.data() + begin, n, int8::factor_of(scale), codes + begin);
    }
  }
  void decode(std::span<const std::byte> in, std::span<float> out) const override {
    const std::byte* const scales = in.data();
    const auto* const codes = reinterpret_cast<const std::int8_t*>(scales + in.size() - out.size());
    for (std::size_t begin = 0; begin < out.size(); begin += kBlock) {
      const std::size_t n = std::min(kBlock, out.size() - begin);
      float scale = 0;
      std::memcpy(&scale, scales + begin / kBlock * sizeof scale, sizeof scale);
      const bool zero = std::bit_cast<std::uint32_t>(scale) == 0;
      if (!zero && !(scale >= int8::kLeastScale && std::isfinite(scale))) damaged_block("an int8 scale");
      const std::int32_t largest =
          from_int8(codes + begin, n, static_cast<double>(scale), out.data() + begin);
      if (largest != (zero ? 0 : 127)) damaged_block("int8 values that do not belong to their scale");
    }
  }
};

const bool int8_registered = [] {
  value_codecs().add("int8", "1 byte per value, scaled by blocks of 256",
                     [](const CompressOptions&) -> std::unique_ptr<ValueCodec> {
                       return std::make_unique<Int8ValueCode>();
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
