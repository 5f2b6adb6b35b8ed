#include "compress/select/passes/magnitude_passes.h"

#include <omp.h>

#include <limits>

#include "tests/compress/fixtures.h"
#include "tests/compress/select/select_once.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// In two passes, in long double.
MagnitudeMoments plain_moments(const std::vector<float>& x, double above) {
  MagnitudeMoments m;
  long double sum = 0, squares = 0, about = 0;
  m.smallest = std::numeric_limits<double>::infinity();
  std::vector<double> tail;
  for (const float v : x)
    if (std::abs(static_cast<double>(v)) > above) tail.push_back(std::abs(static_cast<double>(v)));
  for (const double a : tail) {
    sum += a;
    squares += static_cast<long double>(a) * a;
    m.smallest = std::min(m.smallest, a);
    m.largest = std::max(m.largest, a);
  }
  m.count = tail.size();
  m.mean = static_cast<double>(sum / m.count);
  for (const double a : tail) about += (a - sum / m.count) * (a - sum / m.count);
  m.variance = static_cast<double>(about / (m.count - 1));
  m.norm = static_cast<double>(std::sqrt(squares));
  return m;
}

void check_same(const MagnitudeMoments& a, const MagnitudeMoments& b) {
  CHECK(a.count == b.count);
  CHECK(a.mean == Approx(b.mean).epsilon(1e-13));
  CHECK(a.variance == Approx(b.variance).epsilon(1e-11));
  CHECK(a.norm == Approx(b.norm).epsilon(1e-13));
  CHECK(a.smallest == b.smallest);
  CHECK(a.largest == b.largest);
}

}  // namespace

TEST_CASE("the moments of magnitudes are those of the definition, of all and of a tail") {
  const std::size_t n = GENERATE(2u, 15u, 16u, 1000u, 70001u);
  const std::vector<float> x = noise(n, 1, 2), addend = noise(n, 2);
  std::vector<float> sum(n), u = x;
  for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + addend[i];
  check_same(accumulate_with_magnitudes(std::span<float>(u), std::span<const float>(addend)),
             plain_moments(sum, -1));
  CHECK(same_bits(u, sum));
  const double t = n < 100 ? 0.0 : 1.5;
  check_same(magnitudes_above(std::span<const float>(sum), t), plain_moments(sum, t));
  CHECK(count_above(std::span<const float>(sum), key_below(t)) == plain_moments(sum, t).count);
}

TEST_CASE("a constant has its magnitude as mean and variance 0, exactly") {
  std::vector<float> x(50001, 0.1f);
  for (std::size_t i = 0; i < x.size(); i += 3) x[i] = -x[i];
  const auto m = accumulate_with_magnitudes(std::span<float>(x), std::span<const float>());
  CHECK(m.mean == static_cast<double>(0.1f));
  CHECK(m.variance == 0);
  CHECK(m.constant());
  CHECK(magnitudes_above(std::span<const float>(x), 1.0).count == 0);
}

TEST_CASE("a value near the largest gives the same mean of magnitudes wherever it lies") {
  const std::size_t n = 50001;
  for (const std::size_t at : {std::size_t{0}, n / 2, n - 1, std::size_t{77}}) {
    std::vector<float> x(n, 1.0f);
    x[at] = -std::numeric_limits<float>::max();
    INFO("at " << at);
    CHECK(accumulate_with_magnitudes(x, {}).mean ==
          Approx(static_cast<double>(std::numeric_limits<float>::max()) / static_cast<double>(n))
              .epsilon(1e-13));
  }
}

TEST_CASE("moments see a NaN or Inf anywhere") {
  for (const std::size_t at : {0u, 17u, 20001u, 40002u})
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
      std::vector<float> x = noise(40003, 3);
      x[at] = static_cast<float>(bad);
      CHECK_FALSE(accumulate_with_magnitudes(std::span<float>(x), std::span<const float>()).finite);
    }
}

TEST_CASE("the mean logarithm of magnitudes is that of the definition, zeros included") {
  std::vector<float> x = noise(40007, 4);
  std::fill(x.begin() + 100, x.begin() + 900, 0.0f);
  const double norm = plain_moments(x, -1).norm;
  long double sum = 0;
  for (const float v : x) sum += std::log(std::abs(static_cast<double>(v)) / norm + 0x1p-52);
  CHECK(mean_log_magnitude(std::span<const float>(x), norm) ==
        Approx(static_cast<double>(sum / x.size())).epsilon(1e-12));
}

TEST_CASE("a key of what reaches a threshold separates the numbers around it") {
  for (const double t : {0.1, 0.5, 1.0, 3e-45, 1e30, 0.30000000000000004}) {
    const MagnitudeKey key = key_reaching(t);
    float x = static_cast<float>(t);
    for (int i = 0; i < 3; ++i) x = std::nextafter(x, 0.0f);
    for (int i = 0; i < 6; ++i, x = std::nextafter(x, std::numeric_limits<float>::max()))
      CHECK((key_of(x) > key) == (static_cast<double>(x) >= t));
  }
  CHECK(key_reaching(0) == -1);
  CHECK(key_reaching(-1) == -1);
}

TEST_CASE("a threshold search counts and takes what exceeds, with and without a list") {
  const std::vector<float> x = noise(300000, 5);
  for (const std::size_t limit : {10u, 1000u, 1000000u}) {
    ThresholdSearch search;
    search.start(x, limit);
    for (const double t : {2.0, 3.5, 2.5, 0.5, 3.0, -1.0, 9.0}) {
      const std::vector<std::uint32_t> expected = positions_above(x, t);
      CHECK(search.count(key_below(t)) == expected.size());
      Selection selected;
      search.take(key_below(t), expected.size(), selected);
      CHECK(selected.indices == expected);
      CHECK(well_formed(selected, x));
    }
  }
}

TEST_CASE("moments of magnitudes do not depend on the number of threads") {
  const std::vector<float> x = noise(500003, 6);
  const int before = omp_get_max_threads();
  std::vector<std::vector<double>> results;
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    std::vector<float> u = x;
    const auto all = accumulate_with_magnitudes(std::span<float>(u), std::span<const float>(x));
    const auto tail = magnitudes_above(std::span<const float>(u), 1.0);
    results.push_back({all.mean, all.variance, all.norm, tail.mean, tail.variance, tail.smallest,
                       mean_log_magnitude(std::span<const float>(u), all.norm)});
  }
  omp_set_num_threads(before);
  CHECK(results[0] == results[1]);
}

TEST_CASE("a magnitude at the bound does not belong to the tail, also behind the last whole block") {
  std::vector<float> x(16 + 4, 2.0f);
  x[3] = 3, x[18] = -3;
  CHECK(magnitudes_above(std::span<const float>(x), 2.0).count == 2);
}
