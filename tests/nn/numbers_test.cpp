// Random numbers, and bfloat16.
#include "nn/core/bfloat16.h"
#include "nn/core/rng.h"
#include "tests/support/catch.h"

using namespace topknot;

TEST_CASE("Philox4x32-10 gives its authors' known answers") {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Philox{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Philox{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("normal numbers have mean 0 and variance 1, and streams differ") {
  const CounterRng a(1, RngUse::test, 0), b(1, RngUse::test, 1), c(1, RngUse::init, 0);
  double sum = 0, squares = 0;
  int equal = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = a.normal(i);
    sum += x, squares += x * x;
    equal += a.bits(i) == b.bits(i) || a.bits(i) == c.bits(i);
  }
  CHECK(std::abs(sum / n) < 0.02);
  CHECK(squares / n == Approx(1.0).margin(0.02));
  CHECK(equal < 3);
}

TEST_CASE("every bfloat16 survives the way to float and back, a NaN as a NaN") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const BFloat16 value{std::uint16_t(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide))
      REQUIRE(std::isnan(to_float(to_bfloat16(wide))));
    else
      REQUIRE(to_bfloat16(wide).bits == bits);
  }
}

TEST_CASE("a float goes to the nearest bfloat16, in the middle to the even one") {
  for (std::uint32_t bits = 0; bits < 0x7F7F; bits += 7) {
    const double lower = to_float(BFloat16{std::uint16_t(bits)}),
                 upper = to_float(BFloat16{std::uint16_t(bits + 1)});
    const float middle = float((lower + upper) / 2);
    REQUIRE(middle == (lower + upper) / 2);
    REQUIRE(to_bfloat16(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
    REQUIRE(to_bfloat16(std::nextafter(middle, 0.0f)).bits == bits);
    REQUIRE(to_bfloat16(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits == bits + 1);
    REQUIRE(to_bfloat16(-std::nextafter(middle, 0.0f)).bits == (bits | 0x8000));
  }
}

TEST_CASE("what is not finite, or too large, shows in bfloat16") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(to_float(to_bfloat16(infinity)) == infinity);
  CHECK(to_float(to_bfloat16(-infinity)) == -infinity);
  CHECK(to_float(to_bfloat16(std::numeric_limits<float>::max())) == infinity);
  CHECK(std::isnan(to_float(to_bfloat16(std::numeric_limits<float>::signaling_NaN()))));
}

TEST_CASE("the forms for many elements do what those for one do") {
  std::vector<float> values(1003);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(float(i)) * 1e3f;
  std::vector<BFloat16> narrow(values.size()), sum(values.size());
  std::vector<float> wide(values.size());
  to_bfloat16(values.data(), values.size(), narrow.data());
  to_float(narrow.data(), narrow.size(), wide.data());
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = to_bfloat16(float(i));
  const std::vector<BFloat16> before = sum;
  add(sum.data(), narrow.data(), narrow.size(), sum.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    REQUIRE(narrow[i].bits == to_bfloat16(values[i]).bits);
    REQUIRE(wide[i] == to_float(narrow[i]));
    REQUIRE(sum[i].bits == to_bfloat16(to_float(before[i]) + wide[i]).bits);
  }
}
