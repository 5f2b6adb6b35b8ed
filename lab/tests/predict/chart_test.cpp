#include "lab/predict/chart.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace topknot {

TEST_CASE("axes with ends that are equal, far apart or no numbers have few ticks") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const double lo : {0.0, 1.0, 1e16, 9e18, 1e300, -1e308, -inf, nan})
    for (const double hi : {0.0, 1.0, 1e16 + 2, 9e18 + 2048, std::nextafter(1e300, inf), 1e308, inf, nan}) {
      INFO(lo << " to " << hi);
      CHECK(linear_ticks(lo, hi, 8, Unit::plain).size() <= 18);
      CHECK(log_ticks(lo, hi, Unit::plain).size() <= 40);
      Scale scale;
      scale.lo = lo, scale.hi = hi, scale.from = 0, scale.to = 100;
      for (const double value : {0.0, 1e308, -inf, nan}) {
        CHECK(std::fabs(scale(value)) <= 10000);
        scale.logarithmic = true;
        CHECK(std::fabs(scale(value)) <= 10000);
        scale.logarithmic = false;
      }
    }
}

TEST_CASE("ticks are round, inside their range, and labelled with as many digits as they need") {
  const auto labels = [](const std::vector<Tick>& ticks) {
    std::string text;
    for (const auto& tick : ticks) text += tick.label + "|";
    return text;
  };
  CHECK(labels(linear_ticks(0, 2.3, 5, Unit::plain)) == "0.0|0.5|1.0|1.5|2.0|");
  CHECK(labels(linear_ticks(0.05, 0.83, 4, Unit::percent)) == "20 %|40 %|60 %|80 %|");
  CHECK(labels(linear_ticks(0, 55000, 5, Unit::plain)) == "0|20k|40k|");
  CHECK(labels(linear_ticks(1, 1, 5, Unit::plain)) == "1|");
  CHECK(labels(log_ticks(900, 2e6, Unit::bytes)) == "1 kB|10 kB|100 kB|1 MB|");
  CHECK(labels(log_ticks(0.015, 0.3, Unit::plain)) == "0.02|0.05|0.1|0.2|");
  CHECK(labels(log_ticks(0.2, 40, Unit::plain)) == "0.3|1|3|10|30|");
}

TEST_CASE("smoothing and thinning keep the mean of what they cover and pass over gaps") {
  const std::vector<Point> points = {{0, 1}, {1, 2}, {2, 3}, {3, std::numeric_limits<double>::quiet_NaN()},
                                     {4, 5}, {5, 6}};
  const auto thin = thin_out(points, 3);
  REQUIRE(thin.size() == 4);
  CHECK(thin[0].y == Approx(1.5));
  CHECK(thin[1].y == Approx(3));
  CHECK(thin[3].x == 5);
  CHECK(smooth(points, 3)[1].y == Approx(2));
  CHECK(smooth(points, 3)[3].y == Approx(4));
  CHECK(smooth(points, 1)[0].y == 1);
}

}  // namespace topknot
