#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "compress/codec/layouts.h"
#include "nn/core/base/check.h"

namespace topknot {

double RawLayout::expected_bytes(std::size_t count, std::size_t) const {
  return 4.0 * static_cast<double>(count);
}

IndexLayout::Size RawLayout::size(std::span<const std::uint32_t> indices, std::size_t) const {
  return {indices.size_bytes(), 0};
}

void RawLayout::encode(std::span<const std::uint32_t> indices, std::size_t, std::vector<std::byte>& out,
                       std::vector<std::uint32_t>&) const {
  const auto bytes = std::as_bytes(indices);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

std::size_t RawLayout::decode(std::span<const std::byte> in, std::size_t, std::span<std::uint32_t> out,
                              std::vector<std::uint32_t>&) const {
  if (in.size() < out.size_bytes()) damaged_block("positions are cut off");
  std::memcpy(out.data(), in.data(), out.size_bytes());
  return out.size_bytes();
}

double AllLayout::expected_bytes(std::size_t, std::size_t) const {
  return 0.0;
}

IndexLayout::Size AllLayout::size(std::span<const std::uint32_t>, std::size_t) const {
  return {};
}

void AllLayout::encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>&,
                       std::vector<std::uint32_t>&) const {
  TOPKNOT_CHECK(indices.size() == numel, "not every element travels");
}

std::size_t AllLayout::decode(std::span<const std::byte>, std::size_t numel, std::span<std::uint32_t> out,
                              std::vector<std::uint32_t>&) const {
  if (out.size() != numel)
    damaged_block(fmt::format("{} entries without positions, of {}", out.size(), numel));
  std::iota(out.begin(), out.end(), 0u);
  return 0;
}

namespace {
const bool raw_registered = [] {
  index_codecs().add("raw", "4 bytes per position", make_layout<RawLayout>);
  return true;
}();
}  // namespace

}  // namespace topknot
