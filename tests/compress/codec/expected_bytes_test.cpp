// What a block is expected to take, by codec, against the blocks that are written.
#include <cmath>

#include "compress/codec/codec.h"
#include "tests/support/catch.h"
#include "tests/support/positions.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// With positions drawn uniformly.
std::size_t written_bytes(const std::string& codec, const std::string& values, std::size_t count,
                          std::size_t numel) {
  SparseVector entries;
  entries.indices = uniform_positions(numel, count, 5);
  REQUIRE(entries.indices.size() == count);
  for (std::size_t i = 0; i < count; ++i)
    entries.values.push_back(static_cast<float>(std::sin(static_cast<double>(i))));
  return write_block(entries, numel, index_codecs().find(codec), value_codecs().find(values)).size();
}

}  // namespace

TEST_CASE("a block takes what was expected: a header, the codec's positions, the values") {
  const auto payload = [](const std::string& codec, const std::string& values) {
    constexpr std::size_t kCount = 1000, kNumel = 1000000, kHeader = 16;
    const std::size_t written = written_bytes(codec, values, kCount, kNumel);
    CHECK(static_cast<double>(expected_block_bytes(codec, values, kCount, kNumel)) ==
          Approx(static_cast<double>(written)).epsilon(0.01));
    return written - kHeader;
  };
  CHECK(payload("raw", "fp32") == 8000);
  CHECK(payload("run16", "fp32") == 6000);
  CHECK(payload("run16", "bf16") == 4000);
  CHECK(payload("bitmap", "fp32") == 125000 + 4000);
  CHECK(payload("raw", "int8") == 4000 + 1000 + 4 * 4);
  CHECK(payload("auto", "fp16") == payload("rice", "fp16"));
}

TEST_CASE("the expected bytes of Rice and fp16 hold from few entries to many") {
  for (const double density : {1e-5, 1e-3, 0.1, 1.0}) {
    constexpr std::size_t kNumel = 4000000;
    const auto count = static_cast<std::size_t>(density * kNumel);
    CHECK(static_cast<double>(expected_block_bytes("rice", "fp16", count, kNumel)) ==
          Approx(static_cast<double>(written_bytes("rice", "fp16", count, kNumel))).epsilon(0.02));
  }
}
