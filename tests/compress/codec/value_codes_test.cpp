// Value codes: finite in, finite out, within the error that each code's precision says.
#include <algorithm>
#include <cmath>
#include <limits>

#include "compress/codec/codec.h"
#include "nn/core/rng.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr float kMax = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();

std::vector<float> through(const std::string& code, const std::vector<float>& values) {
  const auto* const value_codec = &value_codecs().find(code);
  std::vector<std::byte> bytes;
  value_codec->encode(values, bytes);
  REQUIRE(bytes.size() == value_codec->bytes(values.size()));
  std::vector<float> back(values.size());
  value_codec->decode(bytes, back);
  return back;
}

std::vector<float> normal_values(std::size_t n, double scale, std::uint32_t seed) {
  const CounterRng rng(seed, RngUse::test);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(scale * rng.normal(i));
  return values;
}

float largest(const std::vector<float>& values) {
  float m = 0;
  for (const float value : values) m = std::max(m, std::abs(value));
  return m;
}

}  // namespace

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
    values.push_back(std::ldexp(rng.uniform(2 * i) - 0.5f, static_cast<int>(rng.below(2 * i + 1, 40)) - 25));
  for (const float tie : {0x1.002p0f, 0x1.006p0f, 0x1.8p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1.ffep-15f})
    values.insert(values.end(), {tie, -tie});
  const std::vector<float> back = through("fp16", values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    int exponent = 0;
    std::frexp(values[i], &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
    const double ulp = std::ldexp(1.0, std::max(exponent - 11, -24));
    INFO(values[i]);
    REQUIRE(static_cast<double>(back[i]) == std::nearbyint(static_cast<double>(values[i]) / ulp) * ulp);
  }
}

TEST_CASE("int8 is within half a step of each block's own largest magnitude") {
  std::vector<float> values = normal_values(1000, 1.0, 13);
  for (std::size_t i = 256; i < 512; ++i) values[i] *= 1e-4f;
  for (std::size_t i = 512; i < 768; ++i) values[i] = 0;
  const std::vector<float> back = through("int8", values);
  for (std::size_t begin = 0; begin < values.size(); begin += 256) {
    const std::size_t end = std::min(values.size(), begin + 256);
    const float m = largest({values.begin() + static_cast<std::ptrdiff_t>(begin),
                             values.begin() + static_cast<std::ptrdiff_t>(end)});
    for (std::size_t i = begin; i < end; ++i) {
      REQUIRE(std::abs(back[i] - values[i]) <= m / 254 * 1.0001f);
      if (std::abs(values[i]) == m) REQUIRE(back[i] == values[i]);
    }
  }
}

TEST_CASE("what the value codec loses stays in the residual, with every code") {
  for (const std::string& index : index_codecs().names())
    for (const std::string& value : value_codecs().names()) {
      INFO(index << ", " << value);
      CompressOptions options = named("topk");
      options.codec = index;
      options.values = value;
      const auto compressor = make_compressor(options, whole_group(500, 1));
      const std::vector<float> g = normal_values(500, 0.01, 21);
      std::vector<float> gradient = g, spare(500);
      StepContext info;
      info.density = 0.1;
      const std::vector<std::vector<std::byte>> blocks = {compressor->encode({gradient, spare}, info).block};
      compressor->decode({blocks, {}});
      const std::span<float> average = compressor->commit({});
      const std::vector<float>& residual = average.data() == gradient.data() ? spare : gradient;
      std::size_t sent = 0;
      for (std::size_t i = 0; i < g.size(); ++i) {
        REQUIRE(residual[i] == g[i] - average[i]);
        sent += average[i] != 0;
      }
      CHECK(sent >= 45);  // int8 may round the smallest of a block to 0
    }
}
