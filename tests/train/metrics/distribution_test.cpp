#include "train/recorder.h"

#include <cmath>
#include <filesystem>
#include <numeric>

#include "nn/core/base/check.h"
#include "nn/core/rng.h"
#include "tests/data/temp_folder.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

// Golden vectors: u_i = ((7919 i) mod 10007) / 10007 - 0.5, cubed times 8.
std::vector<float> cubic(double shift) {
  std::vector<float> x(10007);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double u = static_cast<double>(i * 7919 % 10007) / 10007 - 0.5;
    x[i] = static_cast<float>(8 * u * u * u + shift);
  }
  return x;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

TEST_CASE("moments and contraction of the golden vectors") {
  const DistributionRecord plain = distribution_of(cubic(0), 0.01);
  CHECK(plain.mean == Approx(-9.9930049e-05).epsilon(1e-4));
  CHECK(plain.deviation == Approx(0.37798337264).epsilon(1e-7));
  CHECK(plain.k == 100);
  CHECK(plain.contraction == Approx(0.932111452).epsilon(1e-6));
  CHECK(plain.bound == Approx(1 - 100.0 / 10007).epsilon(1e-12));
  CHECK(plain.bell_bound == Approx(plain.bound * plain.bound).epsilon(1e-12));
  const DistributionRecord shifted = distribution_of(cubic(0.5), 0.01);
  CHECK(shifted.mean == Approx(0.49990007).epsilon(1e-6));
  CHECK(shifted.deviation == Approx(0.377983373).epsilon(1e-6));
}

TEST_CASE("a few values, by hand") {
  const std::vector<float> u{1, -2, 3, -4};
  const DistributionRecord r = distribution_of(u, 0.25);
  CHECK(r.contraction == Approx(14.0 / 30));
  CHECK(r.median == -0.5);
  CHECK(r.laplace_scale == Approx(2.5));
  CHECK(r.deviation == Approx(std::sqrt(29.0 / 3)));
  const auto exponent = [&](int e) { return r.magnitudes[static_cast<std::size_t>(e - r.least_exponent)]; };
  CHECK(exponent(0) == 1);
  CHECK(exponent(1) == 2);
  CHECK(exponent(2) == 1);
}

TEST_CASE("every element is counted once in each histogram, those far out and zeros too") {
  std::vector<float> u(5000);
  const CounterRng rng(1, RngUse::test);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = i % 10 ? rng.normal(i) : 0.0f;
  u[3] = 1e3f, u[5] = 1e-30f, u[7] = -1e20f;
  const DistributionRecord r = distribution_of(u, 0.001);
  CHECK(r.below == 1);
  CHECK(total(r.histogram) + r.below + r.above == 5000);
  CHECK(r.zeros == 500);
  CHECK(total(r.magnitudes) + r.zeros == 5000);
  CHECK(r.histogram.size() == static_cast<std::size_t>(kHistogramBins));
}

TEST_CASE("a normal vector fills the bins as the normal distribution does, and keeps the bell's bound") {
  std::vector<float> u(200000);
  const CounterRng rng(2, RngUse::test);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = rng.normal(i);
  const DistributionRecord r = distribution_of(u, 0.001);
  const double width = 2 * kHistogramReach / kHistogramBins;
  // The middle bin holds |z| < width / 2.
  CHECK(static_cast<double>(r.histogram[kHistogramBins / 2]) / 200000 ==
        Approx(std::erf(width / 2 / std::sqrt(2.0))).epsilon(0.03));
  CHECK(r.contraction == Approx(0.98753).margin(0.001));
  CHECK(r.contraction < r.bell_bound);
}

TEST_CASE("equal magnitudes break the bell's bound and meet the other one") {
  const std::vector<float> u(1000, -0.5f);
  const DistributionRecord r = distribution_of(u, 0.1);
  CHECK(r.contraction == Approx(0.9).epsilon(1e-12));
  CHECK(r.contraction == Approx(r.bound).epsilon(1e-12));
  CHECK(r.contraction > r.bell_bound);
  CHECK(r.histogram[kHistogramBins / 2] == 1000);
}

TEST_CASE("zeros, one element and density 1 have a record, a NaN has none") {
  CHECK(distribution_of(std::vector<float>(10, 0.0f), 0.1).contraction == 0);
  CHECK(distribution_of(std::vector<float>{2}, 0.001).contraction == 0);
  CHECK(distribution_of(std::vector<float>{1, 2, 3}, 1).contraction == 0);
  CHECK_THROWS_AS(distribution_of(std::vector<float>{1, NAN}, 0.1), Error);
}

TEST_CASE("a distribution reads back from the metrics as it was written") {
  const TempFolder temp;
  DistributionRecord record = distribution_of(cubic(0), 0.01);
  record.step = 7, record.epoch = 0.5;
  MetricsWriter(temp.at("m.jsonl")).write(record);
  const Metrics metrics = read_metrics(temp.at("m.jsonl"));
  REQUIRE(metrics.distributions.size() == 1);
  const DistributionRecord& back = metrics.distributions[0];
  CHECK(back.step == 7);
  CHECK(back.contraction == record.contraction);
  CHECK(back.laplace_scale == record.laplace_scale);
  CHECK(back.histogram == record.histogram);
  CHECK(back.magnitudes == record.magnitudes);
  CHECK(back.least_exponent == kLeastExponent);
}
