#include "compress/select/passes/quantiles.h"

#include <algorithm>
#include <limits>
#include <numbers>

namespace topknot {
namespace {

constexpr double kLargeShape = 1e6;
constexpr int kMostTerms = 100000;

// ln Gamma(x), x > 0, by Stirling's series after shifting x above 10. (std::lgamma writes a global variable.)
double log_gamma(double x) {
  double shift = 1;
  for (; x < 10; x += 1) shift *= x;
  const double r = 1 / x, r2 = r * r;
  const double series =
      r * (1.0 / 12 - r2 * (1.0 / 360 -
                            r2 * (1.0 / 1260 -
                                  r2 * (1.0 / 1680 - r2 * (1.0 / 1188 - r2 * (691.0 / 360360 - r2 / 156))))));
  return (x - 0.5) * std::log(x) - x + 0.5 * std::log(2 * std::numbers::pi) + series - std::log(shift);
}

// x^shape e^-x / Gamma(shape): x times the density.
double weight(double shape, double x) {
  return std::exp(shape * std::log(x) - x - log_gamma(shape));
}

struct Tails {
  double lower, upper;
};
Tails tails(double shape, double x) {
  if (x <= 0) return {0, 1};
  const double w = weight(shape, x);
  if (x < shape + 1) {
    double term = 1 / shape, sum = term;
    for (int i = 1; i < kMostTerms && term > sum * 1e-17; ++i) sum += term *= x / (shape + i);
    const double lower = std::min(1.0, w * sum);
    return {lower, 1 - lower};
  }
  // Lentz's method.
  constexpr double tiny = 1e-300;
  double b = x + 1 - shape, c = 1 / tiny, d = 1 / b, fraction = d;
  for (int i = 1; i < kMostTerms; ++i) {
    const double a = -i * (i - shape);
    b += 2;
    d = a * d + b;
    if (std::abs(d) < tiny) d = tiny;
    c = b + a / c;
    if (std::abs(c) < tiny) c = tiny;
    d = 1 / d;
    fraction *= d * c;
    if (std::abs(d * c - 1) < 1e-16) break;
  }
  const double upper = std::min(1.0, w * fraction);
  return {1 - upper, upper};
}

double wilson_hilferty(double shape, double q) {
  const double root = 1 - 1 / (9 * shape) - normal_quantile(q) / (3 * std::sqrt(shape));
  return root > 0 ? shape * root * root * root : 0;
}

}  // namespace

double gamma_tail(double shape, double x) {
  TOPKNOT_CHECK(shape > 0 && std::isfinite(shape) && x >= 0, "gamma_tail of " + std::to_string(x));
  return tails(shape, x).upper;
}

double gamma_tail_quantile(double shape, double q) {
  TOPKNOT_CHECK(shape > 0 && std::isfinite(shape) && q > 0 && q < 1,
                "gamma_tail_quantile of " + std::to_string(q));
  const double start = wilson_hilferty(shape, q);
  if (shape > kLargeShape) return start;
  const bool upper = q < 0.5;
  const double target = std::log(upper ? q : 1 - q);
  // ln x; the tail beyond the higher end is below the least double.
  double low = std::log(std::numeric_limits<double>::min());
  double high = std::log(shape + 60 * std::sqrt(shape) + 800);
  if (!upper && tails(shape, std::exp(low)).lower >= 1 - q) return 0;
  double y = start > 0 ? std::log(start) : (target + log_gamma(shape + 1)) / shape;
  for (int i = 0; i < 200; ++i) {
    if (!(y > low && y < high)) y = low + (high - low) / 2;
    const double x = std::exp(y);
    const Tails t = tails(shape, x);
    const double value = upper ? t.upper : t.lower;
    const double error = std::log(value) - target;  // falls with y for the upper tail
    if ((error > 0) == upper)
      low = y;
    else
      high = y;
    const double slope = weight(shape, x) / value * (upper ? -1 : 1);
    const double next = y - error / slope;
    if (error == 0 || std::abs(next - y) < 1e-15 * std::max(1.0, std::abs(y))) return x;
    if (high - low < 1e-16 * std::max(1.0, std::abs(y))) return x;
    y = next;  // NaN and what leaves the bracket become its middle
  }
  return std::exp(y);
}

}  // namespace topknot
