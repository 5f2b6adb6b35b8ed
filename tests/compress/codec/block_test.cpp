// Blocks on the wire: what is written is read, and nothing else is.
#include <cstring>

#include "compress/codec/codec.h"
#include "nn/core/rng.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Codes {
  const IndexCodec* index = &index_codecs().find("raw");
  const ValueCodec* value = &value_codecs().find("fp32");
  std::vector<std::byte> write(const SparseVector& entries, std::size_t numel) const {
    return write_block(entries, numel, *index, *value);
  }
  SparseVector read(std::span<const std::byte> block, std::size_t numel) const {
    SparseVector entries;
    read_block(block, numel, *index, *value, entries);
    return entries;
  }
};

SparseVector some_entries() {
  return {true, {0, 3, 4, 99}, {1.5f, -0.0f, 1e-42f, -3e38f}};
}

template <class T>
void put(std::vector<std::byte>& block, std::size_t at, T value) {
  REQUIRE(at + sizeof value <= block.size());
  std::memcpy(block.data() + at, &value, sizeof value);
}

}  // namespace

TEST_CASE("a block reads back as it was written, 16 bytes of header and 8 an entry") {
  const Codes codes;
  const SparseVector entries = some_entries();
  const std::vector<std::byte> block = codes.write(entries, 100);
  CHECK(block.size() == 16 + 4 * 8);
  const SparseVector back = codes.read(block, 100);
  CHECK(back.finite);
  CHECK(back.indices == entries.indices);
  CHECK(same_bits(back.values, entries.values));

  const SparseVector none = codes.read(codes.write({}, 100), 100);
  CHECK((none.finite && none.indices.empty()));
  SparseVector broken;
  broken.finite = false;
  CHECK_FALSE(codes.read(codes.write(broken, 100), 100).finite);
}

TEST_CASE("the header is what docs/compress.md says") {
  const std::vector<std::byte> block = Codes().write({true, {5}, {1.0f}}, 258);
  const std::vector<unsigned> expected = {0x54, 0x4E, 0x4B, 0x54, 1, 1, 0, 0, 2, 1, 0,    0,
                                          1,    0,    0,    0,    5, 0, 0, 0, 0, 0, 0x80, 0x3F};
  REQUIRE(block.size() == expected.size());
  for (std::size_t i = 0; i < block.size(); ++i) CHECK(std::to_integer<unsigned>(block[i]) == expected[i]);
}

TEST_CASE("a block cut anywhere, or with bytes left over, is refused") {
  const Codes codes;
  const std::vector<std::byte> block = codes.write(some_entries(), 100);
  for (std::size_t length = 0; length < block.size(); ++length)
    CHECK_THROWS_AS(codes.read(std::span(block).first(length), 100), Error);
  std::vector<std::byte> longer = block;
  longer.push_back(std::byte{0});
  CHECK_THROWS_AS(codes.read(longer, 100), Error);
}

TEST_CASE("a block that says something wrong is refused, and the message says what") {
  const Codes codes;
  const std::vector<std::byte> good = codes.write(some_entries(), 100);
  const auto with = [&](std::size_t at, auto value) {
    std::vector<std::byte> block = good;
    put(block, at, value);
    return block;
  };
  const auto refusal = [&](const std::vector<std::byte>& block, std::size_t numel) -> std::string {
    try {
      codes.read(block, numel);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto says = [](const std::string& text, const std::string& part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  says(refusal(with(0, std::uint32_t{1}), 100), "version");
  says(refusal(with(4, std::uint8_t{2}), 100), "version");
  says(refusal(with(5, std::uint8_t{3}), 100), "flags");
  says(refusal(with(6, std::uint8_t{1}), 100), "compress.codec");
  says(refusal(with(7, std::uint8_t{1}), 100), "compress.values");
  says(refusal(good, 101), "100 elements where the group has 101");
  says(refusal(with(12, std::uint32_t{3}), 100), "bytes of values");
  says(refusal(with(12, std::uint32_t{5}), 100), "position");  // the first value read as one
  says(refusal(with(12, std::uint32_t{100}), 100), "shorter");
  says(refusal(with(12, std::uint32_t{0xFFFFFFFF}), 100), "count");
  says(refusal(with(5, std::uint8_t{0}), 100), "count");     // entries, yet not finite
  says(refusal(with(20, std::uint32_t{4}), 100), "ascend");  // 0, 4, 4, 99
  says(refusal(with(16, std::uint32_t{3}), 100), "ascend");  // 3, 3, 4, 99
  says(refusal(with(28, std::uint32_t{100}), 100), "100 of 100");
  says(refusal(with(28, std::uint32_t{0xFFFFFFFF}), 100), "position");
  says(refusal(with(32, std::uint32_t{0x7F800000}), 100), "not finite");
  says(refusal(with(32, std::uint32_t{0xFFC00000}), 100), "not finite");
}

TEST_CASE("random damage is refused, or changes values only") {
  const Codes codes;
  const std::vector<std::byte> good = codes.write(some_entries(), 100);
  const CounterRng rng(37, RngUse::test);
  std::size_t refused = 0;
  for (std::uint32_t trial = 0; trial < 20000; ++trial) {
    std::vector<std::byte> block = good;
    const std::uint32_t changes = 1 + rng.below(8 * trial, 3);
    for (std::uint32_t c = 0; c < changes; ++c)
      block[rng.below(8 * trial + 2 * c + 1, static_cast<std::uint32_t>(block.size()))] =
          static_cast<std::byte>(rng.bits(8 * trial + 2 * c + 2));
    try {
      const SparseVector entries = codes.read(block, 100);
      REQUIRE(entries.indices.size() == entries.values.size());
      for (std::size_t i = 0; i < entries.indices.size(); ++i) {
        REQUIRE(entries.indices[i] < 100);
        REQUIRE((i == 0 || entries.indices[i] > entries.indices[i - 1]));
        REQUIRE(std::isfinite(entries.values[i]));
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused > 5000);
  for (std::uint32_t trial = 0; trial < 2000; ++trial) {
    std::vector<std::byte> noise(rng.below(trial, 200));
    for (std::size_t i = 0; i < noise.size(); ++i)
      noise[i] = static_cast<std::byte>(rng.bits(1000 * trial + i));
    CHECK_THROWS_AS(codes.read(noise, 100), Error);
  }
}

TEST_CASE("a compressor refuses damaged blocks, a missing one, and its own come back changed") {
  const auto make = [] { return make_compressor(named("topk"), whole_group(4, 2)); };
  std::vector<float> gradient = {1, 2, 3, 4}, spare(4);
  StepContext info;
  info.density = 0.5;
  const auto round = [&](auto&& change) {
    auto compressor = make();
    std::vector<std::vector<std::byte>> blocks(2, compressor->encode({gradient, spare}, info).block);
    change(blocks);
    compressor->decode({blocks, {}});
  };
  CHECK_NOTHROW(round([](auto&) {}));
  CHECK_THROWS_AS(round([](auto& blocks) { blocks[1].pop_back(); }), Error);
  CHECK_THROWS_AS(round([](auto& blocks) { blocks.pop_back(); }), Error);
  CHECK_THROWS_AS(round([](auto& blocks) { blocks[0][16] = std::byte{0}; }), Error);
}

TEST_CASE("the largest finite value is sent") {
  const float largest = std::numeric_limits<float>::max();
  const Codes codes;
  const SparseVector back = codes.read(codes.write({true, {2, 7}, {largest, -largest}}, 10), 10);
  CHECK(back.values == std::vector<float>{largest, -largest});
}
