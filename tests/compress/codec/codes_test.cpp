// Index codes: every set of positions comes back, in the bytes that the code's definition says.
#include "compress/codec/code_bits.h"
#include "tests/compress/codec/through.h"
#include "tests/support/any_threads.h"
#include "tests/support/positions.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Positions = std::vector<std::uint32_t>;

const std::vector<std::string> kCodes = {"raw", "run16", "rice", "bitmap", "ans", "auto"};

const IndexCodec* code_named(const std::string& name) {
  return &index_codecs().find(name);
}

SparseVector entries_at(const Positions& positions) {
  SparseVector entries;
  entries.indices = positions;
  for (const std::uint32_t position : positions)
    entries.values.push_back(float(position % 7) - 3.0f);  // zeros among them
  return entries;
}

std::vector<std::byte> block_of(const Positions& positions, std::size_t numel, const std::string& code) {
  return write_block(entries_at(positions), numel, *code_named(code), value_codecs().find("fp32"));
}

SparseVector read(std::span<const std::byte> block, std::size_t numel, const std::string& code) {
  SparseVector entries;
  read_block(block, numel, *code_named(code), value_codecs().find("fp32"), entries);
  return entries;
}

void check_round_trip(const Positions& positions, std::size_t numel) {
  for (const std::string& code : kCodes) {
    INFO(code << ": " << positions.size() << " of " << numel);
    const SparseVector back = read(block_of(positions, numel, code), numel, code);
    CHECK(back.finite);
    CHECK(back.indices == positions);
    CHECK(back.values == entries_at(positions).values);
  }
}

// The positions' own bits per entry.
double bits_per_entry(const Positions& positions, std::size_t numel, const std::string& code) {
  const std::size_t bytes = block_of(positions, numel, code).size() - 16 - 4 * positions.size();
  return 8.0 * double(bytes) / double(positions.size());
}

constexpr float kMax = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();

float largest(const std::vector<float>& values) {
  float m = 0;
  for (const float value : values) m = std::max(m, std::abs(value));
  return m;
}

// With positions drawn uniformly.
std::size_t written_bytes(const std::string& codec, const std::string& values, std::size_t count,
                          std::size_t numel) {
  SparseVector entries;
  entries.indices = uniform_positions(numel, count, 5);
  REQUIRE(entries.indices.size() == count);
  for (std::size_t i = 0; i < count; ++i) entries.values.push_back(float(std::sin(double(i))));
  return write_block(entries, numel, index_codecs().find(codec), value_codecs().find(values)).size();
}

}  // namespace

TEST_CASE("positions drawn uniformly come back in every index codec at densities from 1e-5 to 1") {
  const std::size_t numel = 300007;
  std::uint64_t seed = 0;
  for (const double density : {1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0})
    check_round_trip(uniform_positions(numel, target_count(density, numel), ++seed), numel);
}

TEST_CASE("the first, the last, all and no position come back in every index codec") {
  for (const std::size_t numel : {1u, 2u, 7u, 8u, 9u, 63u, 64u, 65u, 1023u, 1024u, 1025u, 2049u, 70000u}) {
    const auto last = std::uint32_t(numel - 1);
    Positions all(numel);
    std::iota(all.begin(), all.end(), 0u);
    check_round_trip(all, numel);
    check_round_trip({}, numel);
    check_round_trip({0}, numel);
    check_round_trip({last}, numel);
    if (numel > 1) check_round_trip({0, last}, numel);
    all.pop_back();
    check_round_trip(all, numel);
  }
  check_round_trip({}, 0);
}

TEST_CASE("clusters and gaps of a million come back in every index codec") {
  const std::size_t numel = 6000000;
  Positions clusters;
  for (std::uint32_t cluster = 0; cluster < 5; ++cluster)
    for (std::uint32_t i = 0; i < 1500; ++i) clusters.push_back(1000000 * cluster + 65535 + i);
  check_round_trip(clusters, numel);
  check_round_trip({0, 1000000, 1000001, 2065536, 2131071, 2131072, 5999999}, numel);
}

TEST_CASE("run16 fills a run of a million with 15 entries of value zero, 6 bytes each") {
  const std::vector<std::byte> block = block_of({0, 1000000}, 1000001, "run16");
  CHECK(block.size() == 16 + (2 + 15) * 6);
  // 999999 = 15 * 65535 + 16974
  std::vector<std::uint16_t> words(17);
  std::memcpy(words.data(), block.data() + 16, 34);
  CHECK(words.front() == 0);
  CHECK(words.back() == 16974);
  for (std::size_t i = 1; i < 16; ++i) CHECK(words[i] == 65535);
  std::vector<float> values(17);
  std::memcpy(values.data(), block.data() + 16 + 34, 68);
  for (std::size_t i = 1; i < 16; ++i) CHECK(values[i] == 0);
  CHECK(values.back() == entries_at({1000000}).values[0]);
  // The longest run that needs no filler, and the first that does.
  CHECK(block_of({65534}, 100000, "run16").size() == 16 + 6);
  CHECK(block_of({65535}, 100000, "run16").size() == 16 + 12);
}

TEST_CASE("measured bits per entry are those of the codes' theory at uniform positions") {
  const std::size_t numel = 4000000;
  // Golden values: bits per entry of Golomb-Rice with the best b.
  const std::pair<double, double> rice[] = {{0.001, 11.495}, {0.01, 8.108}, {0.05, 5.786}, {0.1, 4.756}};
  for (const auto& [density, bits] : rice) {
    const Positions positions = uniform_positions(numel, target_count(density, numel), 11);
    CHECK(bits_per_entry(positions, numel, "rice") == Approx(bits).epsilon(0.01));
    CHECK(bits_per_entry(positions, numel, "run16") == 16);
    CHECK(bits_per_entry(positions, numel, "raw") == 32);
    CHECK(bits_per_entry(positions, numel, "bitmap") == Approx(1 / density));
    const double entropy = -std::log2(density) - (1 - density) / density * std::log2(1 - density);
    CHECK(bits_per_entry(positions, numel, "rice") > entropy);
  }
}

TEST_CASE("Rice's parameter is round(log2(0.693 / density)), never below 0") {
  for (std::size_t count = 1; count <= 1000000; count = count * 5 / 4 + 1) {
    const double exact = std::log2(0.693 * 1e6 / double(count));
    CHECK(rice_parameter(count, 1000000) == std::max(0L, std::lround(exact)));
  }
  CHECK(rice_parameter(1, (std::size_t{1} << 31) - 1) == 30);
  CHECK(rice_parameter(1, 1) == 0);
}

TEST_CASE("auto takes the smallest layout for each message") {
  const auto layout_of = [](const Positions& positions, std::size_t numel) {
    const std::vector<std::byte> block = block_of(positions, numel, "auto");
    for (const char* code : {"raw", "run16", "rice", "bitmap"})
      CHECK(block.size() <= block_of(positions, numel, code).size());
    return std::to_integer<int>(block[6]);
  };
  const std::size_t numel = 200000;
  CHECK(layout_of(uniform_positions(numel, 200, 1), numel) == 2);
  CHECK(layout_of(uniform_positions(numel, 100000, 1), numel) == 3);
  CHECK(layout_of(uniform_positions(numel, 199999, 1), numel) == 3);
  CHECK(layout_of(uniform_positions(numel, numel, 1), numel) == 4);
  CHECK(block_of(uniform_positions(numel, numel, 1), numel, "auto").size() == 16 + 4 * numel);
  CHECK(layout_of({70}, 100) == 1);
  CHECK(layout_of({150000}, numel) == 0);  // run16 would need two fillers
  CHECK(block_of({}, 100, "auto").size() == 16);
}

TEST_CASE("the bytes of a block do not depend on the number of threads") {
  const std::size_t numel = 2000000;
  for (const std::size_t count : {60000u, 900000u}) {
    const Positions positions = uniform_positions(numel, count, 3);
    for (const std::string& code : kCodes)
      check_any_threads([&] { return block_of(positions, numel, code); });
  }
}

TEST_CASE("Rice words of 33 bits come back wherever they begin") {
  // Mostly neighbours, a bit each, so that b is 0: a run of 32 zeros takes 33 bits.
  for (std::uint32_t before = 400; before < 432; ++before) {
    Positions positions(before);
    std::iota(positions.begin(), positions.end(), 0u);
    for (int i = 0; i < 10; ++i) positions.push_back(positions.back() + 33);
    const std::size_t numel = positions.back() + 1;
    REQUIRE(rice_parameter(positions.size(), numel) == 0);
    CHECK(read(block_of(positions, numel, "rice"), numel, "rice").indices == positions);
  }
}

TEST_CASE("auto counts the values of fillers, and takes the lower number of equals") {
  constexpr std::size_t kCode = 6;  // of the header
  // Two bytes by run16, and by a bitmap.
  CHECK(block_of({5}, 16, "auto")[kCode] == std::byte{1});
  // Three words by run16, and three values; 16 bytes by raw, 18 by the others.
  CHECK(block_of({10, 70000}, 100000, "auto")[kCode] == std::byte{0});
}

TEST_CASE("what decodes from finite values is finite, to the largest float and the smallest") {
  const std::vector<std::vector<float>> cases = {{kMax},
                                                 {-kMax, kMax, 1.0f},
                                                 {kMax, kTiny},
                                                 {std::nextafter(kMax, 0.0f), 0x1.ffdp127f, 0x1.ffep127f},
                                                 {kTiny, -3 * kTiny},
                                                 {0x1p-126f, 0x1p-127f},
                                                 {0.0f, -0.0f},
                                                 {0x1.ffffp13f, 65504.0f, 65520.0f, 1e6f},
                                                 {}};
  for (const std::string& code : value_codecs().names())
    for (const std::vector<float>& values : cases) {
      const std::vector<float> back = through(code, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        INFO(code << ": " << values[i] << " came back as " << back[i]);
        CHECK(std::isfinite(back[i]));
        if (code.starts_with("centroid") || code == "e3m0") continue;  // of means, and powers of two
        CHECK(std::abs(back[i] - values[i]) <=
              std::max(std::abs(values[i]) / 127, largest(values) / 254) + 0x1p-119f);
      }
    }
}

TEST_CASE("what a code has decoded it sends again without change") {
  for (const std::string& code : value_codecs().names())
    for (const double scale : {1e-38, 1e-30, 1e-3, 1.0, 1e37}) {
      const std::vector<float> once = through(code, normal_values(1000, scale, 3));
      CHECK(same_bits(through(code, once), once));
    }
}

TEST_CASE("e3m0 takes the nearest power of two down to a 64th of the largest, ties to the even code") {
  // Golden values: a float64 script after the paper's format.
  CHECK(through("e3m0", {1, -0.8f, 0.7f, 0.3f, -0.1f, 0.05f, 0.01f, 0.005f}) ==
        std::vector<float>{1, -1, 0.5f, 0.25f, -0.125f, 0.0625f, 0.015625f, 0});
  // In units of a = 16: the middles.
  CHECK(through("e3m0", {16, 12, -6, 3, 1.5f, 0.75f, 0.375f, 0.125f, -0.125f}) ==
        std::vector<float>{16, 8, -8, 2, 2, 0.5f, 0.5f, 0, 0});
  CHECK(through("e3m0", {-0.0f, 0x1p-120f}) == std::vector<float>{0, 0});
  CHECK(value_codecs().find("e3m0").bytes(4095) == 4 + 2048);
}

TEST_CASE("fp8 takes the nearest number of E4M3, ties to even, down to a 229,376th of the largest") {
  // Golden values: torch 2.10's float8_e4m3fn of the same numbers.
  CHECK(through("fp8",
                {448, 447, 17, 18, 19, -20.5f, 0.0175f, 0.0146f, 0.0085f, 0.0029f, 0.00098f, 0.00097f}) ==
        std::vector<float>{448, 448, 16, 18, 20, -20, 0.017578125f, 0.013671875f, 0.0078125f, 0.001953125f,
                           0.001953125f, 0});
  CHECK(through("fp8", {7, -1, 0x1p-120f}) == std::vector<float>{7, -1, 0});
  CHECK(same_bits(through("fp8", {1, -1e-9f, -0.0f}), std::vector<float>{1, 0, 0}));
  CHECK(value_codecs().find("fp8").bytes(257) == 2 * 4 + 257);
}

TEST_CASE("bf16 rounds to nearest, ties to even") {
  const std::vector<float> values = {1.0f,          0x1.01p0f,  0x1.03p0f,    0x1.010002p0f,
                                     0x1.00fffep0f, -0x1.01p0f, -0x1.03p0f,   0x1p-149f,
                                     0x1.8p-134f,   0x1p-133f,  0x1.fffp127f, -0.0f};
  const std::vector<float> expected = {1.0f,       1.0f, 0x1.04p0f, 0x1.02p0f, 1.0f,        -1.0f,
                                       -0x1.04p0f, 0.0f, 0x1p-133f, 0x1p-133f, 0x1.fep127f, -0.0f};
  CHECK(same_bits(through("bf16", values), expected));
}

TEST_CASE("fp16 keeps 11 bits of all that is within 2^-28 of the largest, whatever the scale") {
  for (const double scale : {1e-30, 1e-6, 1.0, 1e6, 1e30}) {
    std::vector<float> values = normal_values(5000, scale, 7);
    for (std::size_t i = 0; i < values.size(); i += 3) values[i] *= 0x1p-10f;
    const std::vector<float> back = through("fp16", values);
    const float m = largest(values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float bound = std::max(std::abs(values[i]) * 0x1p-11f, m * 0x1.01p-39f);
      REQUIRE(std::abs(back[i] - values[i]) <= bound);
    }
  }
}

// Independent of the code's bit arithmetic: the nearest multiple of the ulp, by the C library.
TEST_CASE("fp16 rounds to the nearest half, ties to even") {
  std::vector<float> values = {0x1p14f};  // fixes the scale at 1
  const CounterRng rng(9, RngUse::test);
  for (std::uint32_t i = 0; i < 4000; ++i)
    values.push_back(std::ldexp(rng.uniform(2 * i) - 0.5f, int(rng.below(2 * i + 1, 40)) - 25));
  for (const float tie : {0x1.002p0f, 0x1.006p0f, 0x1.8p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1.ffep-15f})
    values.insert(values.end(), {tie, -tie});
  const std::vector<float> back = through("fp16", values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    int exponent = 0;
    std::frexp(values[i], &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
    const double ulp = std::ldexp(1.0, std::max(exponent - 11, -24));
    INFO(values[i]);
    REQUIRE(double(back[i]) == std::nearbyint(double(values[i]) / ulp) * ulp);
  }
}

TEST_CASE("int8 is within half a step of each block's own largest magnitude") {
  std::vector<float> values = normal_values(1000, 1.0, 13);
  for (std::size_t i = 256; i < 512; ++i) values[i] *= 1e-4f;
  for (std::size_t i = 512; i < 768; ++i) values[i] = 0;
  const std::vector<float> back = through("int8", values);
  for (std::size_t begin = 0; begin < values.size(); begin += 256) {
    const std::size_t end = std::min(values.size(), begin + 256);
    const float m = largest({values.begin() + std::ptrdiff_t(begin), values.begin() + std::ptrdiff_t(end)});
    for (std::size_t i = begin; i < end; ++i) {
      REQUIRE(std::abs(back[i] - values[i]) <= m / 254 * 1.0001f);
      if (std::abs(values[i]) == m) REQUIRE(back[i] == values[i]);
    }
  }
}

TEST_CASE("int8 and fp8 decode to the quotient q a / 127 or q a / 448, rounded once") {
  const CounterRng rng(11, RngUse::init);
  for (std::uint64_t i = 0; i < 20000; ++i) {
    // Multiples of 7 and 127 have exact quotients, where a rounding of the reciprocal would show.
    const std::uint32_t mantissa = rng.bits(i) >> 9, factor = i % 3 == 0 ? 127 : i % 3 == 1 ? 7 : 1;
    const auto scale = float(std::max(factor, mantissa / factor * factor));
    const auto a = double(scale);
    const auto q = static_cast<std::int8_t>(1 + i % 127);
    CHECK(int8::decode(q, a) == float(q * a / 127));
    const auto code = std::uint8_t(i % 0x7F);
    const double magnitude = double(fp8::decode(code, 448.0));  // exact
    CHECK(fp8::decode(code, a) == float(magnitude * a / 448));
  }
}

TEST_CASE("a block takes what was expected: a header, the codec's positions, the values") {
  const auto payload = [](const std::string& codec, const std::string& values) {
    constexpr std::size_t kCount = 1000, kNumel = 1000000, kHeader = 16;
    const std::size_t written = written_bytes(codec, values, kCount, kNumel);
    CHECK(double(expected_block_bytes(codec, values, kCount, kNumel)) ==
          Approx(double(written)).epsilon(0.01));
    return written - kHeader;
  };
  CHECK(payload("raw", "fp32") == 8000);
  CHECK(payload("run16", "fp32") == 6000);
  CHECK(payload("run16", "bf16") == 4000);
  CHECK(payload("bitmap", "fp32") == 125000 + 4000);
  CHECK(payload("ans", "fp32") < payload("rice", "fp32"));
  CHECK(payload("raw", "int8") == 4000 + 1000 + 4 * 4);
  CHECK(payload("auto", "fp16") == payload("rice", "fp16"));
}

TEST_CASE("the expected bytes of Rice and fp16 hold from few entries to many") {
  for (const double density : {1e-5, 1e-3, 0.1, 1.0}) {
    constexpr std::size_t kNumel = 4000000;
    const auto count = std::size_t(density * kNumel);
    CHECK(double(expected_block_bytes("rice", "fp16", count, kNumel)) ==
          Approx(double(written_bytes("rice", "fp16", count, kNumel))).epsilon(0.02));
  }
}
