// signSGD, QSGD and TernGrad: their rounding, their error feedback, and what a step leaves behind.
#include "compress/quantise/block.h"
#include "compress/quantise/compressor.h"
#include "tests/compress/lowrank/lowrank_fixture.h"

using namespace topknot;
using namespace topknot::testing;
using namespace topknot::quantise;

namespace {

const std::string kMethods[] = {"signsgd", "qsgd", "terngrad"};

CompressOptions quantised(const std::string& name, const std::vector<std::string>& keys = {}) {
  return with(named(name, {"seed=11", "bucket=128"}), keys);
}

// What one rank sends of x in each of `steps` steps, entry by entry: the mean, and its standard error by the
// sample.
struct Sample {
  std::vector<double> mean, error;
};
Sample sample(const CompressOptions& options, const GroupSpec& spec, const std::vector<float>& x, int steps) {
  SimulatedRanks ranks(options, spec);
  std::vector<double> sum(x.size()), squares(x.size());
  for (int step = 0; step < steps; ++step) {
    ranks[0].gradient = x;
    if (!ranks.step(step, 1.0)) throw Error("a step that is not finite");
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = double(ranks[0].average[i]);
      sum[i] += value;
      squares[i] += value * value;
    }
  }
  Sample result;
  const double n = steps;
  for (std::size_t i = 0; i < x.size(); ++i) {
    result.mean.push_back(sum[i] / n);
    result.error.push_back(std::sqrt(std::max(0.0, squares[i] / n - sum[i] * sum[i] / (n * n)) / n));
  }
  return result;
}

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
  for (const int value : values) result.push_back(std::byte(value));
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
    const int s = format.kind == Kind::sign ? 0 : int(format.levels);
    codes[i] = format.kind == Kind::sign ? std::int16_t(rng.below(at, 2))
                                         : std::int16_t(int(rng.below(at, std::uint32_t(2 * s + 1))) - s);
  }
  return block_of(format, scales, codes);
}

// Of a block without scales of 0, from its values.
std::vector<std::int16_t> codes_of(const Format& format, const std::vector<std::byte>& block,
                                   const std::vector<float>& values) {
  std::vector<std::int16_t> codes(format.numel);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    float scale;
    std::memcpy(&scale, block.data() + 20 + 4 * cell_of(format, i), sizeof scale);
    const double multiple = std::round(double(values[i]) / scale * format.levels);
    codes[i] = std::int16_t(format.kind == Kind::sign ? multiple < 0 : multiple);
  }
  return codes;
}

const std::vector<Format> kFormats = {sign(19, {8, 19}),   sign(16, {16}),       ternary(13, {4, 13}),
                                      ternary(10, {10}),   levels(1, 9, {5, 9}), levels(5, 11, {4, 8, 11}),
                                      levels(127, 9, {9}), levels(1000, 7, {7}), levels(32767, 3, {3})};

}  // namespace

TEST_CASE("uniform numbers made many at a time are those of the generator") {
  const CounterRng rng(0x123456789abcull, RngUse::compress, 7, 3);
  for (const std::uint64_t first : {0ull, 1ull, 6ull, 0x3fffffffeull})
    for (const std::size_t count : {1u, 63u, 64u, 200u}) {
      std::vector<float> made(count);
      quantise::uniforms(0x123456789abcull, (std::int64_t{5} << 32) + 7, 3, first, count, made.data());
      for (std::size_t i = 0; i < count; ++i) REQUIRE(made[i] == rng.uniform(first + i));
    }
}

TEST_CASE("signsgd sends the mean magnitude with each sign, and zero as plus") {
  GroupSpec spec = whole_group(6, 1);
  spec.segments = {{0, 4}, {4, 6}};
  SimulatedRanks ranks(quantised("signsgd"), spec);
  ranks[0].gradient = {1.0f, -3.0f, 0.0f, -0.0f, 5.0f, -7.0f};
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].gradient == std::vector<float>{1, -1, 1, 1, 6, -6});
  CHECK(ranks[0].residual == std::vector<float>{0, -2, -1, -1, -1, -1});
  // u = {1, -5, -1, -1 | -1, -1}: error feedback corrects the sign of zeros.
  ranks[0].gradient = {1.0f, -3.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  REQUIRE(ranks.step(1, 1.0));
  CHECK(ranks[0].gradient == std::vector<float>{2, -2, -2, -2, -1, -1});
  CHECK(ranks[0].residual == std::vector<float>{-1, -3, 1, 1, 0, 0});
}

TEST_CASE("signsgd's error shrinks as its paper has it: |u - C(u)|^2 = (1 - |u|_1^2 / (d |u|_2^2)) |u|^2") {
  const std::size_t n = 5000;
  SimulatedRanks ranks(quantised("signsgd"), whole_group(n, 1));
  const auto u = ranks[0].gradient = normal_vector(3, 0, n);
  double l1 = 0;
  for (const float x : u) l1 += std::abs(double(x));
  REQUIRE(ranks.step(0, 1.0));
  const double square = norm(u) * norm(u), left = norm(ranks[0].residual);
  CHECK(left * left == Approx((1 - l1 * l1 / (double(n) * square)) * square).epsilon(1e-5));
}

TEST_CASE("qsgd and terngrad without clipping are unbiased, with the variance of their formulas") {
  const std::size_t n = 40;
  const int steps = 4000;
  std::vector<float> x = normal_vector(4, 0, n);
  x[3] = 0, x[7] = 1e-3f;
  for (const std::string name : {"qsgd", "terngrad"})
    for (const int levels : {1, 3, 127}) {
      INFO(name << ", " << levels << " levels");
      const Sample sent =
          sample(quantised(name, {"levels=" + std::to_string(levels), "bucket=16", "clip_sigma=0"}),
                 whole_group(n, 1), x, steps);
      for (std::size_t i = 0; i < n; ++i) {
        // Of a value between two neighbours a step apart, with the fraction f: step^2 f (1 - f).
        double gap = 0;
        if (name == "qsgd") {
          for (std::size_t j = i / 16 * 16; j < std::min(n, i / 16 * 16 + 16); ++j)
            gap += double(x[j]) * double(x[j]);
          gap = std::sqrt(gap) / levels;
        } else {
          for (const float y : x) gap = std::max(gap, std::abs(double(y)));
        }
        const double exact = std::abs(double(x[i])) / gap, f = exact - std::floor(exact);
        const double error = gap * std::sqrt(f * (1 - f) / steps);
        CHECK(std::abs(sent.mean[i] - double(x[i])) <= 4 * error + 1e-6 * gap);
        if (f > 0.05 && f < 0.95) CHECK(sent.error[i] == Approx(error).epsilon(0.15));
      }
    }
}

TEST_CASE("terngrad clips at standard deviations about the mean, and sends -s, 0 or s") {
  std::vector<float> x(101, 0.5f);
  for (std::size_t i = 0; i < 100; ++i) x[i] = i % 2 ? 1.0f : -1.0f;
  x[100] = 50.0f;
  // Of the population: mean 50 / 101, E x^2 = (100 + 2500) / 101.
  const double mean = 50.0 / 101, sigma = std::sqrt(2600.0 / 101 - mean * mean);
  SimulatedRanks ranks(quantised("terngrad"), whole_group(101, 1));
  const float s = float(2.5 * sigma);
  for (int step = 0; step < 20; ++step) {
    ranks[0].gradient = x;
    REQUIRE(ranks.step(step, 1.0));
    for (std::size_t i = 0; i < 100; ++i) {
      const float value = ranks[0].average[i];
      CHECK((value == 0 || value == Approx(x[i] * s)));
    }
    CHECK(ranks[0].average[100] == Approx(s));
  }
}

TEST_CASE("random rounding draws by step, rank and place in the model, not by group") {
  for (const std::string name : {"qsgd", "terngrad"}) {
    const CompressOptions options = quantised(name, {"levels=2", "clip_sigma=0", "bucket=8"});
    GroupSpec shifted = whole_group(64, 2);
    SimulatedRanks a(options, shifted), b(options, shifted);
    shifted.offset = 8;
    SimulatedRanks c(options, shifted);
    std::vector<float> x(64, 0.3f);
    x[63] = 0.7f;  // the same scale for terngrad, whose other entries are then drawn
    for (auto* ranks : {&a, &b, &c})
      for (std::size_t r = 0; r < 2; ++r) (*ranks)[r].gradient = x;
    REQUIRE(a.step(0, 1.0));
    REQUIRE(b.step(1, 1.0));
    REQUIRE(c.step(0, 1.0));
    CHECK(a.blocks()[0] != a.blocks()[1]);
    CHECK(a.blocks()[0] != b.blocks()[0]);
    // Equal entries, rounded alike at one place in the model.
    CHECK(std::equal(a[0].average.begin() + 8, a[0].average.begin() + 56, c[0].average.begin()));
  }
}

TEST_CASE("quantised contributions are averaged with their weights, in rank order") {
  for (const std::string& name : kMethods) {
    INFO(name);
    const std::size_t n = 3000;
    const GroupSpec spec = whole_group(n, 3);
    std::vector<std::vector<float>> sent;
    // Each rank's own values, from a group whose other ranks send zeros.
    for (std::uint32_t r = 0; r < 3; ++r) {
      SimulatedRanks alone(quantised(name), spec);
      alone[r].gradient = normal_vector(0, r, n);
      std::vector<float> weights(3, 0.0f);
      weights[r] = 3.0f;
      REQUIRE(alone.step(0, 1.0, weights));
      sent.push_back({alone[0].average.begin(), alone[0].average.end()});
    }
    SimulatedRanks ranks(quantised(name), spec);
    step_alike({&ranks}, [&](std::size_t r) { return normal_vector(0, std::uint32_t(r), n); }, 0, 1.0,
               {0.5f, 1.5f, 1.0f});
    CHECK(ranks.blocks()[0].size() == planned_message_bytes(quantised(name), spec, 1.0));
    CHECK(ranks[0].compressor->diagnostics().selected == n);
    for (std::size_t i = 0; i < n; ++i) {
      const float plain = (0.5f * sent[0][i] + 1.5f * sent[1][i] + sent[2][i]) / 3.0f;
      CHECK(ranks[0].average[i] == Approx(plain).margin(1e-6));
    }
    for (std::size_t r = 1; r < 3; ++r) CHECK(same_bits<float>(ranks[r].average, ranks[0].average));
  }
}

TEST_CASE("qsgd takes error feedback only where rounding takes more away than it adds; terngrad never") {
  const auto make = [](const std::string& name, const std::vector<std::string>& keys) {
    make_compressor(with(quantised(name, {"memory=residual"}), keys), whole_group(10, 1));
  };
  CHECK_NOTHROW(make("qsgd", {"levels=12"}));               // 128 / 144 < 1
  CHECK_THROWS_AS(make("qsgd", {"levels=11"}), UserError);  // 128 / 121 and 11.3 / 11 are above 1
  CHECK_THROWS_AS(make("qsgd", {"levels=16", "bucket=256"}), UserError);  // as much as it adds
  CHECK_THROWS_AS(make("terngrad", {}), UserError);
}

TEST_CASE("quantisers deliver zeros, denormals and single entries, and skip a norm beyond float") {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const std::string& name : kMethods) {
    INFO(name);
    const CompressOptions options = quantised(name, {"levels=1"});
    for (const float value : {0.0f, -0.25f, tiny, -3.0f * tiny, 1e30f}) {
      SimulatedRanks one(options, whole_group(1, 1));
      one[0].gradient = {value};
      REQUIRE(one.step(0, 1.0));
      CHECK(one[0].average[0] == value);
    }
  }
  SimulatedRanks huge(quantised("qsgd"), whole_group(8, 1));
  huge[0].gradient.assign(8, 3e38f);  // a norm beyond float
  CHECK_FALSE(huge.step(0, 1.0));
}

TEST_CASE("terngrad does not clip above the largest magnitude") {
  SimulatedRanks ranks(quantised("terngrad", {"clip_sigma=100"}), whole_group(4, 1));
  ranks[0].gradient = {1.0f, -3.0f, 2.0f, 0.5f};
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].average[1] == -3);  // the largest is sent for certain
}

TEST_CASE("qsgd's norm is rounded up, so that no entry exceeds it") {
  SimulatedRanks ranks(quantised("qsgd", {"levels=1"}), whole_group(2, 1));
  ranks[0].gradient = {1.0f, 1e-5f};  // the norm is 1 + 5e-11
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].average[0] == std::nextafter(1.0f, 2.0f));
}

TEST_CASE("the layouts of blocks, by hand") {
  const auto check = [](const Format& format, const std::vector<float>& scales,
                        const std::vector<std::int16_t>& codes, std::vector<std::byte> body,
                        const std::vector<float>& values) {
    INFO("kind " << int(format.kind));
    std::vector<std::byte> expected = bytes({0x54, 0x4B, 0x54, 0x51, 1, 1});
    expected.insert(expected.end(), body.begin(), body.end());
    const auto block = block_of(format, scales, codes);
    CHECK(block == expected);
    std::vector<float> out(format.numel);
    REQUIRE(read_block(format, block, out));
    CHECK(out == values);
  };
  // The kind, then elements, cells and levels; scales; codes.
  check(sign(10, {3, 10}), {1.0f, 0.5f}, {0, 1, 0, 1, 1, 0, 0, 1, 1, 0},
        bytes({1, 0, 10, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0x80, 0x3F, 0, 0, 0, 0x3F, 0x9A, 0b01}),
        {1, -1, 1, -0.5f, -0.5f, 0.5f, 0.5f, -0.5f, -0.5f, 0.5f});
  check(levels(5, 3, {3}), {2.0f}, {-5, 0, 3},  // three bits of level and a sign
        bytes({2, 0, 3, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0x40, 0b00001101, 0b0011}),
        {-2.0f, 0.0f, 2.0f * (3.0f / 5.0f)});
  check(ternary(7, {7}), {3.0f}, {1, -1, 0, 0, 1, -1, 1},
        bytes({3, 0, 7, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0x40, 0x40, 1 + 2 * 3 + 81, 2 + 1 * 3}),
        {3, -3, 0, 0, 3, -3, 3});
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
    const std::vector<std::int16_t> codes = codes_of(format, whole, values);
    auto again = whole;
    const std::size_t step = code_step(format) * 15;
    std::fill(again.end() - std::ptrdiff_t(format.code_bytes()), again.end(), std::byte{0xFF});
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
      CHECK(refused(format, {block.begin(), block.begin() + std::ptrdiff_t(size)}));
    auto longer = block;
    longer.push_back(std::byte{0});
    CHECK(refused(format, longer));
    for (const Format& other : kFormats)
      if (&other != &format) CHECK(refused(other, block));
  }
}

TEST_CASE("a quantised block with any byte changed is refused, or is what a writer makes of other values") {
  for (const Format& format : kFormats) {
    INFO("kind " << int(format.kind) << ", " << format.levels << " levels");
    std::vector<std::int16_t> some;
    for (std::size_t i = 0; i < format.numel; ++i)
      some.push_back(std::int16_t(format.kind == Kind::sign ? i % 2 : (i % 3 - 1) * format.levels));
    const auto block = block_of(format, std::vector<float>(format.cells.size(), 1.5f), some);
    for (std::size_t at = 0; at < block.size(); ++at)
      for (unsigned change = 1; change < 256; ++change) {
        auto changed = block;
        changed[at] ^= std::byte(change);
        if (refused(format, changed)) continue;
        REQUIRE(at >= 20);
        std::vector<float> values(format.numel), scales(format.cells.size());
        REQUIRE(read_block(format, changed, values));
        std::memcpy(scales.data(), changed.data() + 20, scales.size() * sizeof(float));
        for (const float scale : scales) REQUIRE((std::isfinite(scale) && !std::signbit(scale)));
        REQUIRE(block_of(format, scales, codes_of(format, changed, values)) == changed);
      }
  }
}
