// Values as they are.
#include <cstring>

#include "compress/codec/codec.h"

namespace topknot {
namespace {

class Fp32ValueCode final : public ValueCodec {
 public:
  std::uint8_t id() const override { return 0; }
  bool exact() const override { return true; }
  std::size_t bytes(std::size_t count) const override { return count * sizeof(float); }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    const auto bytes = std::as_bytes(values);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  void decode(std::span<const std::byte> in, std::span<float> out) const override {
    if (!out.empty()) std::memcpy(out.data(), in.data(), in.size());
  }
};

const bool fp32_registered = [] {
  value_codecs().add("fp32", "4 bytes per value, exact",
                     [](const CompressOptions&) -> std::unique_ptr<ValueCodec> {
                       return std::make_unique<Fp32ValueCode>();
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
