#include <cstring>

#include "compress/codec/codec.h"

namespace topknot {

namespace {

// u32 per position.
class RawLayout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 0; }
  double expected_bytes(std::size_t count, std::size_t) const override {
    return 4.0 * static_cast<double>(count);
  }

  Size size(std::span<const std::uint32_t> indices, std::size_t) const override {
    return {indices.size_bytes(), 0};
  }

  void encode(std::span<const std::uint32_t> indices, std::size_t, std::vector<std::byte>& out,
              std::vector<std::uint32_t>&) const override {
    const auto bytes = std::as_bytes(indices);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }

  std::size_t decode(std::span<const std::byte> in, std::size_t, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>&) const override {
    if (in.size() < out.size_bytes()) damaged_block("positions are cut off");
    std::memcpy(out.data(), in.data(), out.size_bytes());
    return out.size_bytes();
  }
};

const bool raw_registered = [] {
  index_codecs().add("raw", "4 bytes per position", make_layout<RawLayout>);
  return true;
}();

}  // namespace
}  // namespace topknot
