#include "compress/select/passes/quantiles.h"

#include <cmath>

#include "nn/base/check.h"
#include "tests/support/catch.h"

using namespace topknot;

TEST_CASE(
    "the gamma tail of shape 1 is exponential, of whole shapes a Poisson sum, of a half a normal tail") {
  for (const double x : {1e-8, 0.1, 0.9, 1.0, 2.5, 7.0, 40.0, 300.0}) {
    CHECK(gamma_tail(1.0, x) == Approx(std::exp(-x)).epsilon(1e-13));
    CHECK(gamma_tail(0.5, x) == Approx(std::erfc(std::sqrt(x))).epsilon(1e-12));
    for (const int n : {2, 5, 30}) {
      double term = std::exp(-x), sum = 0;
      for (int i = 0; i < n; term *= x / ++i) sum += term;
      CHECK(gamma_tail(n, x) == Approx(sum).epsilon(1e-12));
    }
  }
  CHECK(gamma_tail(3.0, 0.0) == 1.0);
}

TEST_CASE("the gamma quantile agrees with tables of the chi-square distribution") {
  // Half the chi-square quantile with 2 * shape degrees of freedom.
  struct Row {
    double freedom, tail, value;
  };
  for (const auto& [freedom, tail, value] :
       {Row{1, 0.05, 3.841458820694124}, Row{2, 0.05, 5.991464547107979}, Row{5, 0.01, 15.08627246938899},
        Row{10, 0.05, 18.307038053275146}, Row{10, 0.95, 3.940299136119060},
        Row{100, 0.025, 129.5611971858366}, Row{1, 0.95, 0.003932140000019522}})
    CHECK(2 * gamma_tail_quantile(freedom / 2, tail) == Approx(value).epsilon(1e-11));
}

TEST_CASE("the gamma quantile has closed forms at shapes 1 and a half") {
  for (const double q : {0.99, 0.5, 0.25, 0.01, 0.001, 1e-6, 1e-12}) {
    CHECK(gamma_tail_quantile(1.0, q) == Approx(-std::log(q)).epsilon(1e-13));
    const double z = normal_quantile(q / 2);
    CHECK(gamma_tail_quantile(0.5, q) == Approx(0.5 * z * z).epsilon(1e-11));
  }
}

TEST_CASE("the gamma quantile inverts the tail over all shapes that a fit can give") {
  for (const double shape : {0.02, 0.026, 0.1, 0.7, 1.3, 9.0, 250.0, 1e4, 9e5})
    for (const double q : {0.9, 0.25, 0.05, 0.001, 1e-5}) {
      INFO(shape << " " << q);
      const double x = gamma_tail_quantile(shape, q);
      // Below the least double the answer is 0, whose tail is 1.
      if (x == 0)
        CHECK(std::log(1 - q) + std::lgamma(shape + 1) < shape * std::log(1e-300));
      else
        CHECK(gamma_tail(shape, x) == Approx(q).epsilon(shape < 1000 ? 1e-11 : 1e-8));
    }
}

TEST_CASE("the gamma quantile of a huge shape is continuous with that below it") {
  for (const double q : {0.25, 0.001})
    CHECK(gamma_tail_quantile(1.0000001e6, q) / gamma_tail_quantile(0.9999999e6, q) ==
          Approx(1.0000002).epsilon(1e-9));
  CHECK(gamma_tail_quantile(1e12, 0.001) == Approx(1e12).epsilon(1e-5));
}

TEST_CASE("what is outside the gamma distribution is refused") {
  CHECK_THROWS_AS(gamma_tail_quantile(0, 0.5), Error);
  CHECK_THROWS_AS(gamma_tail_quantile(1, 0), Error);
  CHECK_THROWS_AS(gamma_tail_quantile(1, 1), Error);
  CHECK_THROWS_AS(gamma_tail(1, -1), Error);
}
