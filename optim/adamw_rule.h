#pragma once
// One step of AdamW as arithmetic, for the CPU's loop (optim/adamw.cpp, where the rule is said) and the GPU's kernel
// (optim/adamw.cu).

#include <cmath>
#include <cstdint>

#include "nn/base/host_device.h"
#include "nn/core/step.h"
#include "optim/arena_slice.h"

namespace topknot {

struct AdamwConstants {
  double beta1, beta2, epsilon, weight_decay;
};

// By device. `first`, `second`: moments of the slice.
struct AdamwKernels {
  void (*update)(const ArenaSlice& slice, float* first, float* second, const AdamwConstants& constants,
                 const StepState& state);
};

struct AdamwRates {
  float beta1, beta2, epsilon;
  float rate;        // lr / (1 - beta1^t)
  float correction;  // 1 / sqrt(1 - beta2^t)
  float decay;       // 1 - lr * weight_decay, where an element decays
  float scale;       // of the gradient
};

// By squaring, so that CPU and GPU have the same bits.
TOPKNOT_HOST_DEVICE double power_of(double base, std::int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2 == 1) result *= base;
  return result;
}

// `step` from 0 on.
TOPKNOT_HOST_DEVICE AdamwRates adamw_rates(const AdamwConstants& of, std::int64_t step, double lr,
                                           double scale) {
  return {static_cast<float>(of.beta1),
          static_cast<float>(of.beta2),
          static_cast<float>(of.epsilon),
          static_cast<float>(lr / (1 - power_of(of.beta1, step + 1))),
          static_cast<float>(1 / std::sqrt(1 - power_of(of.beta2, step + 1))),
          static_cast<float>(1 - lr * of.weight_decay),
          static_cast<float>(scale)};
}

TOPKNOT_HOST_DEVICE void adamw_step(float& weight, float gradient, float& first, float& second,
                                    const AdamwRates& rates, bool decays) {
  const float g = gradient * rates.scale;
  first = rates.beta1 * first + (1 - rates.beta1) * g;
  second = rates.beta2 * second + (1 - rates.beta2) * (g * g);
  const float decayed = decays ? weight * rates.decay : weight;
  weight = decayed - rates.rate * (first / (std::sqrt(second) * rates.correction + rates.epsilon));
}

}  // namespace topknot
