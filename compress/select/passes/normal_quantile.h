#pragma once
// The inverse of the standard normal distribution function, for 0 < p < 1, to full double precision: a
// rational starting value (Abramowitz and Stegun 26.2.23, error below 4.5e-4) refined by Halley's method on
// erfc. Throws Error outside.

namespace topknot {

double normal_quantile(double p);

}  // namespace topknot
