// The layout of quantised blocks by hand, and what decoding refuses.
#include <cstring>

#include "compress/quantise/block.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::quantise;

namespace {

Format sign(std::size_t numel, std::vector<std::uint32_t> cells) {
  return {Kind::sign, 1, numel, std::move(cells)};
}
Format levels(std::uint32_t s, std::size_t numel, std::vector<std::uint32_t> cells) {
  return {Kind::levels, s, numel, std::move(cells)};
}
Format ternary(std::size_t numel, std::vector<std::uint32_t> cells) {
  return {Kind::ternary, 1, numel, std::move(cells)};
}

std::vector<std::byte> block_of(const Format& format, const std::vector<float>& scales,
                                const std::vector<std::int16_t>& codes) {
  std::vector<std::byte> block = start_block(format, true);
  write_scales(format, scales, block);
  write_codes(format, codes, 0, codes.size(), block);
  return block;
}

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

bool refused(const Format& format, const std::vector<std::byte>& block) {
  std::vector<float> out(format.numel);
  try {
    read_block(format, block, out);
  } catch (const UserError&) {
    return false;  // a damaged block is no mistake of the user's
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Any legal block: random codes, scales that are floats of all sizes.
std::vector<std::byte> random_block(const Format& format, std::uint32_t stream) {
  const CounterRng rng(97, RngUse::test, stream);
  std::vector<float> scales(format.cells.size());
  for (std::size_t c = 0; c < scales.size(); ++c) scales[c] = std::abs(rng.normal(c));
  std::vector<std::int16_t> codes(format.numel);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::uint64_t at = 1000 + i;
    const int s = format.kind == Kind::sign ? 0 : static_cast<int>(format.levels);
    codes[i] = format.kind == Kind::sign
                   ? static_cast<std::int16_t>(rng.below(at, 2))
                   : static_cast<std::int16_t>(
                         static_cast<int>(rng.below(at, static_cast<std::uint32_t>(2 * s + 1))) - s);
  }
  return block_of(format, scales, codes);
}

const std::vector<Format> kFormats = {sign(19, {8, 19}),   sign(16, {16}),       ternary(13, {4, 13}),
                                      ternary(10, {10}),   levels(1, 9, {5, 9}), levels(5, 11, {4, 8, 11}),
                                      levels(127, 9, {9}), levels(1000, 7, {7}), levels(32767, 3, {3})};

}  // namespace

TEST_CASE("the layout of a block of signs, by hand") {
  const auto block = block_of(sign(10, {3, 10}), {1.0f, 0.5f}, {0, 1, 0, 1, 1, 0, 0, 1, 1, 0});
  CHECK(block ==
        bytes({0x54,       0x4B, 0x54, 0x51, 1, 1, 1, 0,    10, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0,  // header
               0,          0,    0x80, 0x3F, 0, 0, 0, 0x3F,                                       // scales
               0b10011010, 0b01}));
  std::vector<float> out(10);
  REQUIRE(read_block(sign(10, {3, 10}), block, out));
  CHECK(out == std::vector<float>{1, -1, 1, -0.5f, -0.5f, 0.5f, 0.5f, -0.5f, -0.5f, 0.5f});
}

TEST_CASE("the layout of a block of levels, by hand") {
  // s = 5: three bits of level and a sign.
  const auto block = block_of(levels(5, 3, {3}), {2.0f}, {-5, 0, 3});
  CHECK(block ==
        bytes({0x54, 0x4B, 0x54, 0x51, 1,          1,     2, 0, 3, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0,  // header
               0,    0,    0,    0x40, 0b00001101, 0b0011}));
  std::vector<float> out(3);
  REQUIRE(read_block(levels(5, 3, {3}), block, out));
  CHECK(out == std::vector<float>{-2.0f, 0.0f, 2.0f * (3.0f / 5.0f)});
}

TEST_CASE("the layout of a ternary block, by hand") {
  const auto block = block_of(ternary(7, {7}), {3.0f}, {1, -1, 0, 0, 1, -1, 1});
  CHECK(block == bytes({0x54,     0x4B, 0x54, 0x51, 1,
                        1,        3,    0,    7,    0,
                        0,        0,    1,    0,    0,
                        0,        1,    0,    0,    0,  // header
                        0,        0,    0x40, 0x40, 1 + 2 * 3 + 81,
                        2 + 1 * 3}));
  std::vector<float> out(7);
  REQUIRE(read_block(ternary(7, {7}), block, out));
  CHECK(out == std::vector<float>{3, -3, 0, 0, 3, -3, 3});
}

TEST_CASE("a vector that is not finite is sent as a header, and leaves what it is decoded to alone") {
  for (const Format& format : kFormats) {
    auto block = start_block(format, false);
    CHECK(block.size() == 20);
    std::vector<float> out(format.numel, 7.0f);
    CHECK_FALSE(read_block(format, block, out));
    CHECK(out == std::vector<float>(format.numel, 7.0f));
    block.push_back(std::byte{0});
    CHECK(refused(format, block));
  }
}

TEST_CASE("codes written and read in parts are those of the whole") {
  for (Format format : {sign(3000, {1500, 3000}), ternary(3000, {7, 3000}), levels(5, 3000, {3000}),
                        levels(127, 3000, {3000}), levels(700, 3000, {3000})}) {
    const auto whole = random_block(format, 5);
    std::vector<float> values(3000), parts(3000);
    REQUIRE(read_block(format, whole, values));
    for (std::size_t begin = 0; begin < 3000; begin += 7) {
      std::size_t cell = cell_of(format, begin);
      const std::size_t end = std::min<std::size_t>(3000, begin + 7);
      read_values(format, whole, begin, end, cell, parts.data() + begin);
    }
    CHECK(same_bits(values, parts));
    // The same codes again, from the values.
    std::vector<std::int16_t> codes(3000);
    for (std::size_t i = 0; i < 3000; ++i) {
      float scale;
      std::memcpy(&scale, whole.data() + 20 + 4 * cell_of(format, i), sizeof scale);
      const double multiple = std::round(static_cast<double>(values[i]) / scale * format.levels);
      codes[i] = static_cast<std::int16_t>(format.kind == Kind::sign ? multiple < 0 : multiple);
    }
    auto again = whole;
    const std::size_t step = code_step(format) * 15;
    std::fill(again.end() - static_cast<std::ptrdiff_t>(format.code_bytes()), again.end(), std::byte{0xFF});
    for (std::size_t begin = 0; begin < 3000; begin += step) {
      const std::size_t end = std::min(begin + step, std::size_t{3000});
      write_codes(format, std::span(codes).subspan(begin, end - begin), begin, end, again);
    }
    CHECK(again == whole);
  }
}

TEST_CASE("a quantised block that is cut, too long or of another kind is refused") {
  for (const Format& format : kFormats) {
    const auto block = random_block(format, 1);
    std::vector<float> out(format.numel);
    REQUIRE(read_block(format, block, out));
    for (std::size_t size = 0; size < block.size(); ++size)
      CHECK(refused(format, {block.begin(), block.begin() + static_cast<std::ptrdiff_t>(size)}));
    auto longer = block;
    longer.push_back(std::byte{0});
    CHECK(refused(format, longer));
    for (const Format& other : kFormats)
      if (&other != &format) CHECK(refused(other, block));
  }
}

TEST_CASE("each field of a quantised block's header is checked") {
  for (const Format& format : kFormats) {
    const auto block = random_block(format, 2);
    for (std::size_t at = 0; at < 20; ++at)
      for (int bit = 0; bit < 8; ++bit) {
        auto changed = block;
        changed[at] ^= static_cast<std::byte>(1 << bit);
        CHECK(refused(format, changed));
      }
  }
}

TEST_CASE("scales that are negative, infinite or no numbers are refused") {
  for (const Format& format : kFormats)
    for (const std::uint32_t bits : {0x80000000u, 0xBF800000u, 0x7F800000u, 0x7FC00000u, 0xFFFFFFFFu}) {
      auto block = random_block(format, 3);
      std::memcpy(block.data() + 20 + 4 * (format.cells.size() - 1), &bits, sizeof bits);
      CHECK(refused(format, block));
    }
}

TEST_CASE("bits behind the last entry, levels and digits out of range are refused") {
  auto block = block_of(sign(10, {10}), {1.0f}, std::vector<std::int16_t>(10, 1));
  block.back() |= std::byte{0b100};
  CHECK(refused(sign(10, {10}), block));
  block = block_of(levels(5, 3, {3}), {1.0f}, {0, 0, 0});
  block.back() = std::byte{0x10};
  CHECK(refused(levels(5, 3, {3}), block));
  block.back() = std::byte{6};  // of 5
  CHECK(refused(levels(5, 3, {3}), block));
  block.back() = std::byte{8};  // minus zero
  CHECK(refused(levels(5, 3, {3}), block));
  block.back() = std::byte{8 + 5};
  CHECK_FALSE(refused(levels(5, 3, {3}), block));
  block = block_of(levels(100, 2, {2}), {1.0f}, {100, -100});
  CHECK_FALSE(refused(levels(100, 2, {2}), block));
  for (const int bad : {101, 127, 128, 229, 255}) {
    block.back() = static_cast<std::byte>(bad);
    CHECK(refused(levels(100, 2, {2}), block));
  }
  block = block_of(ternary(7, {7}), {1.0f}, std::vector<std::int16_t>(7, -1));
  for (const int bad : {243, 255, 9, 18, 242}) {  // digits behind the last entry, too
    block.back() = static_cast<std::byte>(bad);
    CHECK(refused(ternary(7, {7}), block));
  }
  block = block_of(ternary(7, {7}), {1.0f}, std::vector<std::int16_t>(7, -1));
  block[24] = std::byte{243};
  CHECK(refused(ternary(7, {7}), block));
}

TEST_CASE("a mutated quantised block is refused, or decodes to finite numbers") {
  const CounterRng rng(5, RngUse::test);
  std::uint64_t draw = 0;
  for (const Format& format : kFormats)
    for (std::uint32_t trial = 0; trial < 2000; ++trial) {
      auto block = random_block(format, trial % 16);
      const int changes = 1 + static_cast<int>(rng.below(draw++, 3));
      for (int c = 0; c < changes; ++c) {
        const std::size_t place = rng.below(draw++, static_cast<std::uint32_t>(block.size()));
        block[place] = static_cast<std::byte>(rng.below(draw++, 256));
      }
      if (refused(format, block)) continue;
      std::vector<float> out(format.numel);
      if (!read_block(format, block, out)) {
        CHECK(block.size() == 20);
        continue;
      }
      for (const float x : out) CHECK(std::isfinite(x));
    }
}
