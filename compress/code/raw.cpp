// Positions as 32-bit integers.
#include <cstring>

#include "compress/code/code.h"
#include "nn/core/check.h"

namespace topknot {
namespace {

class RawIndexCode final : public IndexCode {
 public:
  std::uint8_t id() const override { return 0; }
  void encode(std::span<const std::uint32_t> indices, std::size_t,
              std::vector<std::byte>& out) const override {
    const auto bytes = std::as_bytes(indices);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  std::size_t decode(std::span<const std::byte> in, std::size_t,
                     std::span<std::uint32_t> out) const override {
    if (in.size() < out.size_bytes()) throw Error("damaged gradient block: positions are cut off");
    if (!out.empty()) std::memcpy(out.data(), in.data(), out.size_bytes());
    return out.size_bytes();
  }
  std::size_t least_bytes(std::size_t count) const override { return count * sizeof(std::uint32_t); }
};

const bool registered = [] {
  index_codes().add("raw", "4 bytes a position", [](const CompressOptions&) -> std::unique_ptr<IndexCode> {
    return std::make_unique<RawIndexCode>();
  });
  return true;
}();

}  // namespace
}  // namespace topknot
