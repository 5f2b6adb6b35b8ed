// bfloat16: the upper half of a float, rounded to nearest, ties to even. What would round to infinity becomes
// the largest finite one.
#include <cstring>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

TOPKNOT_MULTIVERSION void to_bf16(const float* values, std::size_t n, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t half = bf16::encode(values[i]);
    std::memcpy(out + 2 * i, &half, sizeof half);
  }
}

TOPKNOT_MULTIVERSION void from_bf16(const std::byte* in, std::size_t n, float* values) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, in + 2 * i, sizeof half);
    values[i] = bf16::decode(half);
  }
}

class Bf16ValueCode final : public ValueCodec {
 public:
  std::uint8_t id() const override { return 1; }
  bool exact() const override { return false; }
  std::size_t bytes(std::size_t count) const override { return 2 * count; }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    const std::size_t head = out.size();
    out.resize(head + bytes(values.size()));
    to_bf16(values.data(), values.size(), out.data() + head);
  }
  void decode(std::span<const std::byte> in, std::span<float> out) const override {
    from_bf16(in.data(), out.size(), out.data());
  }
};

const bool bf16_registered = [] {
  value_codecs().add("bf16", "2 bytes per value, 8 bits of precision",
                     [](const CompressOptions&) -> std::unique_ptr<ValueCodec> {
                       return std::make_unique<Bf16ValueCode>();
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
