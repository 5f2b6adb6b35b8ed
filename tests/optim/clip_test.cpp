#include "optim/clip.h"

#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "tests/support/catch.h"
#include "tests/support/threads.h"

using namespace topknot;

TEST_CASE("the norm agrees with a plain double sum and has the same bits for any number of threads") {
  for (std::size_t size : {0u, 1u, 15u, 17u, 8192u, 300007u}) {
    std::vector<float> values(size);
    const CounterRng rng(1, RngUse::test, 0);
    double squares = 0;
    std::vector<double> sums;
    for (std::size_t i = 0; i < size; ++i)
      values[i] = rng.normal(i), squares += double(values[i]) * values[i];
    for (const int threads : {1, 3}) {
      const testing::Threads scope(threads);
      sums.push_back(sum_of_squares(values));
    }
    CHECK(sums[0] == sums[1]);
    CHECK(sums[0] == Approx(squares).epsilon(1e-12));
  }
}

TEST_CASE("scaling by the factor keeps the direction and meets the norm") {
  std::vector<float> values(70000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i % 2 ? -3.0f : 4.0f;
  scale(values, clip_factor(l2_norm(values), 5));
  CHECK(l2_norm(values) == Approx(5));
  CHECK(values[69998] / values[69999] == Approx(-4.0 / 3));
}

TEST_CASE("what is no longer than the norm, and what is not finite, is clipped by nothing") {
  CHECK(clip_factor(5, 5) == 1);
  CHECK(clip_factor(std::numeric_limits<double>::infinity(), 1) == 1);
  CHECK(clip_factor(std::nan(""), 1) == 1);
  CHECK(clip_factor(4, 1) == 0.25);
}

TEST_CASE("a clipping norm of 0 or less is refused") {
  for (const double norm : {0, -1}) CHECK_THROWS_AS(clip_factor(1, norm), UserError);
}
