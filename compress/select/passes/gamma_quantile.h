#pragma once
// The gamma distribution with scale 1: its tail Q(shape, x) = Gamma(shape, x) / Gamma(shape), the regularised
// upper incomplete gamma function, and the inverse.

namespace topknot {

// For shape > 0 and x >= 0, to about 1e-13 of the lesser of Q and 1 - Q for shapes up to 1000 (1e-9 at 1e6):
// the series below x = shape + 1 and the continued fraction above it (Abramowitz and Stegun 6.5.29, 6.5.31).
// Throws Error outside.
double gamma_tail(double shape, double x);

// The x with Q(shape, x) = q, for shape > 0 and 0 < q < 1; 0 where that is below the least double. By Newton's
// method on ln Q (or ln(1 - Q), the lesser) over ln x, kept within a bracket. Shapes above 1e6 by the cube-root
// approximation of Wilson and Hilferty (Abramowitz and Stegun 26.4.17), which is good to 1e-10 there. Throws
// Error outside.
double gamma_tail_quantile(double shape, double q);

}  // namespace topknot
