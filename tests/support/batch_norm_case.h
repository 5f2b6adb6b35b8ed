#pragma once
// A batch norm with what belongs to it, on any device.

#include "tests/support/variables.h"

namespace topknot::testing {

struct BatchNormSetup {
  std::int64_t n, channels, height, width;
  bool residual, relu, training = true;
  float mean = 0.3f;    // of the input
  float before = mean;  // of the running mean
  Shape shape() const { return {n, channels, height, width}; }
  std::string str() const {
    return shape().str() + (residual ? ", residual" : "") + (relu ? ", relu" : "") +
           (training ? ", training" : ", evaluation");
  }
};

// Random inputs, running statistics, and the formula's results in float64.
struct BatchNormCase {
  // `near_zero`: how near to 0, as a part of its scale, y gets no gradient: rounding decides there.
  BatchNormCase(const BatchNormSetup& setup, DType of_type, double near_zero = 0.02)
      : s(setup),
        type(of_type),
        x(rounded_to(type, random_values(s.shape().numel(), 1, s.mean))),
        residual(s.residual ? rounded_to(type, random_values(s.shape().numel(), 4)) : std::vector<float>()),
        gamma(random_values(s.channels, 2, 1)),
        beta(random_values(s.channels, 3)),
        mean(random_values(s.channels, 6, s.before)),
        variance(gamma.size()),
        dy(rounded_to(type, random_values(s.shape().numel(), 5))) {
    for (std::size_t c = 0; c < variance.size(); ++c) variance[c] = 0.5f + 0.1f * static_cast<float>(c % 7);
    if (!s.relu) return;
    // Where y is near 0 rounding decides whether the gradient counts: no gradient there.
    const auto r = formula(false);
    for (std::size_t i = 0; i < dy.size(); ++i)
      if (std::abs(r.y[i]) < near_zero * r.y_scale[i]) dy[i] = 0;
  }
  reference::BatchNorm formula(bool relu) const {
    const Array values = as_double(x);
    return reference::batch_norm(
        {s.n, s.channels, s.height * s.width}, values, reference::absolute(values), as_double(gamma),
        as_double(beta), as_double(residual), s.training ? Array() : as_double(mean),
        s.training ? Array() : as_double(variance), static_cast<double>(epsilon), relu, as_double(dy));
  }

  BatchNormSetup s;
  DType type;
  std::vector<float> x, residual, gamma, beta, mean, variance, dy;
  static constexpr float momentum = 0.3f, epsilon = 1e-3f;
};

struct BatchNormResult {
  std::vector<float> y, dx, dgamma, dbeta, dresidual, mean, variance;
  bool operator==(const BatchNormResult&) const = default;
};

// Sums are those of fp32. What is stored as bfloat16 is off by up to 2^-8 of its terms for each time it is
// rounded: once by our kernels, twice where they finish what cuDNN stored.
inline void check_formula(const BatchNormCase& p, const BatchNormResult& r, int roundings) {
  const double stored = 2e-6 + (p.type == DType::bf16 ? roundings / 256.0 : 0);
  const auto f = p.formula(p.s.relu);
  check_close("y", r.y, f.y, f.y_scale, stored);
  check_close("dx", r.dx, f.dx, f.dx_scale, stored);
  check_close("dgamma", r.dgamma, f.dgamma, f.dgamma_scale, 2e-6);
  check_close("dbeta", r.dbeta, f.dbeta, f.dbeta_scale, 2e-6);
  if (p.s.residual) check_close("dresidual", r.dresidual, f.dresidual, 0);
  if (!p.s.training) {
    CHECK((r.mean == p.mean));
    CHECK((r.variance == p.variance));
    return;
  }
  Array mean(p.mean.size()), variance(mean.size()), scale(mean.size());
  const double count = static_cast<double>(p.s.n * p.s.height * p.s.width), w = p.momentum;
  for (std::size_t c = 0; c < mean.size(); ++c) {
    mean[c] = (1 - w) * p.mean[c] + w * f.mean[c];
    variance[c] = (1 - w) * p.variance[c] + w * f.variance[c] * (count > 1 ? count / (count - 1) : 1);
    scale[c] = std::abs(mean[c]) + 1;
  }
  check_close("running mean", r.mean, mean, scale, 1e-6);
  check_close("running variance", r.variance, variance, 5e-6);
}

}  // namespace topknot::testing
