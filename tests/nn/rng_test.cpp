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
