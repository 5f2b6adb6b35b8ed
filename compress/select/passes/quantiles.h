#pragma once
// The normal distribution, for CPUs and kernels (whose last bits may differ): a fit from sums, and the
// inverse of its distribution function. The gamma distribution, for CPUs: its tail and the tail's inverse.

#include <cmath>
#include <cstddef>
#include <string>

#include "nn/base/check.h"
#include "nn/base/host_device.h"

namespace topknot {

struct NormalFit {
  double mean = 0;
  double deviation = 0;  // sqrt(sum (x - mean)^2 / (n - 1)); NaN for n = 1
};
// The shift that is subtracted from the elements before they are summed: the smallest in magnitude of the
// first, the middle and the last one. A constant vector then has deviation 0 exactly, and one outlier,
// wherever it lies, does not cost the digits of all the others. 0 if that is not finite.
TOPKNOT_HOST_DEVICE double moments_shift(double first, double middle, double last) {
  double least = first;
  if (fabs(middle) < fabs(least)) least = middle;
  if (fabs(last) < fabs(least)) least = last;
  return fabs(least) <= 1.7976931348623157e308 ? least : 0;
}
// From the sums of x - shift and of its square over n elements.
TOPKNOT_HOST_DEVICE NormalFit normal_fit(double shift, double sum, double squares, std::size_t n) {
  const double count = static_cast<double>(n), spread = squares - sum * (sum / count);
  return {shift + sum / count, sqrt((0.0 < spread ? spread : 0.0) / (count - 1.0))};  // 0 / 0 for n = 1
}

// The inverse of the standard normal distribution function for 0 < p < 1, to full double precision: a
// rational starting value (Abramowitz and Stegun 26.2.23, error below 4.5e-4) refined by Halley's method.
TOPKNOT_HOST_DEVICE double normal_quantile_formula(double p) {
  constexpr double sqrt2 = 1.4142135623730951, two_pi = 6.283185307179586;
  // The lower half by symmetry: erfc keeps its relative precision in the tail.
  const double tail = p < 0.5 ? p : 1.0 - p;
  const double t = sqrt(-2.0 * log(tail));
  double x = -(t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                       (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))));
  // Each step cubes the error: 4.5e-4, 1e-10, below rounding.
  for (int i = 0; i < 3; ++i) {
    const double error = 0.5 * erfc(-x / sqrt2) - tail;
    const double step = error * sqrt(two_pi) * exp(0.5 * x * x);
    x -= step / (1.0 + 0.5 * x * step);
  }
  return p < 0.5 ? x : -x;
}

// The same. Throws Error if p is not inside (0, 1).
inline double normal_quantile(double p) {
  TOPKNOT_CHECK(p > 0 && p < 1, "normal_quantile of " + std::to_string(p));
  return normal_quantile_formula(p);
}

// The tail of the gamma distribution with scale 1: Q(shape, x) = Gamma(shape, x) / Gamma(shape), the
// regularised upper incomplete gamma function. For shape > 0 and x >= 0, to about 1e-13 of the lesser of Q
// and 1 - Q for shapes up to 1000 (1e-9 at 1e6): the series below x = shape + 1 and the continued fraction
// above it (Abramowitz and Stegun 6.5.29, 6.5.31). Throws Error outside.
double gamma_tail(double shape, double x);

// The x with Q(shape, x) = q, for shape > 0 and 0 < q < 1; 0 if that is below the least double. By Newton's
// method on ln Q (or ln(1 - Q), the lesser) over ln x, kept within a bracket. Shapes above 1e6 by the
// cube-root approximation of Wilson and Hilferty (Abramowitz and Stegun 26.4.17), to 1e-10. Error outside.
double gamma_tail_quantile(double shape, double q);

}  // namespace topknot
