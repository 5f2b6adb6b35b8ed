#pragma once
// The ways to write positions (docs/compress.md has their bytes).

#include "compress/codec/codec.h"

namespace topknot {

// u32 per position.
class RawLayout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 0; }
  double expected_bytes(std::size_t count, std::size_t numel) const override;
  Size size(std::span<const std::uint32_t> indices, std::size_t numel) const override;
  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
              std::vector<std::uint32_t>& fillers) const override;
  std::size_t decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>& fillers) const override;
};

// u16 runs of zeros between entries, as Deep Gradient Compression (Lin et al., ICLR 2018, 3.1) sends them.
// The paper does not say what becomes of a run that 16 bits do not hold. Here an entry's word is 0 to 65534;
// the word 65535 is a filler: 65535 positions without an entry, and a slot of its own in the value section,
// which is +0. So 6 bytes per entry with fp32, fillers included.
class Run16Layout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 1; }
  double expected_bytes(std::size_t count, std::size_t numel) const override;
  Size size(std::span<const std::uint32_t> indices, std::size_t numel) const override;
  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
              std::vector<std::uint32_t>& fillers) const override;
  std::size_t decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>& fillers) const override;
};

// Golomb-Rice code (Golomb 1966; Rice 1979) of the runs of zeros between entries: the run's quotient by 2^b
// in unary, then b bits of remainder. b = round(log2(0.693 / density)), the best for positions drawn
// uniformly. Cut into parts of kPartEntries entries that begin at whole bytes, so that threads (and a GPU)
// write and read them side by side; a u32 per part says where its bits end.
class RiceLayout final : public IndexLayout {
 public:
  // A part's u32 costs 0.03 bits per entry: within 1 % of the bare code at every density.
  static constexpr std::size_t kPartEntries = 1024;
  static unsigned parameter(std::size_t count, std::size_t numel);  // b: 0 to 30
  std::uint8_t id() const override { return 2; }
  double expected_bytes(std::size_t count, std::size_t numel) const override;
  Size size(std::span<const std::uint32_t> indices, std::size_t numel) const override;
  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
              std::vector<std::uint32_t>& fillers) const override;
  std::size_t decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>& fillers) const override;
};

// A bit per element.
class BitmapLayout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 3; }
  double expected_bytes(std::size_t count, std::size_t numel) const override;
  Size size(std::span<const std::uint32_t> indices, std::size_t numel) const override;
  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
              std::vector<std::uint32_t>& fillers) const override;
  std::size_t decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>& fillers) const override;
};

// Nothing: every element travels. Only compress.codec auto has it, because what is selected decides whether it
// fits.
class AllLayout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 4; }
  double expected_bytes(std::size_t count, std::size_t numel) const override;
  Size size(std::span<const std::uint32_t> indices, std::size_t numel) const override;
  bool fits(std::size_t count, std::size_t numel) const override { return count == numel && count > 0; }
  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
              std::vector<std::uint32_t>& fillers) const override;
  std::size_t decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>& fillers) const override;
};

template <class Layout>
std::unique_ptr<IndexCodec> make_layout(const CompressOptions&) {
  return std::make_unique<Layout>();
}

}  // namespace topknot
