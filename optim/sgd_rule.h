#pragma once
// One step of SGD as arithmetic, for the CPU's loops (optim/sgd.cpp, where the rules are said) and the GPU's kernel
// (optim/sgd.cu).

#include "nn/base/host_device.h"
#include "nn/core/gradient_form.h"
#include "nn/core/step.h"
#include "optim/arena_slice.h"

namespace topknot {

struct SgdRates {
  float lr, momentum, decay, scale;  // decay: 0 where an element does not decay
};

// How a slice is updated, for all elements alike.
struct SgdOptions {
  float momentum, decay;
};

enum class SgdRule { plain, momentum, nesterov, decay_momentum, decay_nesterov, has_lr };

template <SgdRule rule>
inline constexpr bool kHasMomentum = rule != SgdRule::plain&& rule != SgdRule::has_lr;

inline SgdRule sgd_rule(bool momentum, bool nesterov, GradientForm form) {
  if (form == GradientForm::has_lr) return SgdRule::has_lr;
  if (!momentum) return SgdRule::plain;
  if (form == GradientForm::has_momentum) return nesterov ? SgdRule::decay_nesterov : SgdRule::decay_momentum;
  return nesterov ? SgdRule::nesterov : SgdRule::momentum;
}

// By device. `buffer`: momenta of the slice; null for the rules without.
struct SgdKernels {
  void (*update)(SgdRule rule, const ArenaSlice& slice, float* buffer, SgdOptions options,
                 const StepState& state);
};

// T: a float, or several side by side. `buffer` is left alone by the rules without momentum.
template <SgdRule rule, class T>
TOPKNOT_HOST_DEVICE __attribute__((always_inline)) void sgd_step(T& weight, const T& gradient, T& buffer,
                                                                 const SgdRates& rates) {
  if constexpr (rule == SgdRule::has_lr) {
    weight = weight - (gradient * rates.scale + rates.lr * (rates.decay * weight));
  } else {
    constexpr bool apart = rule == SgdRule::decay_momentum || rule == SgdRule::decay_nesterov;
    T direction = rates.decay * weight;
    if constexpr (!apart) direction = gradient * rates.scale + direction;
    if constexpr (kHasMomentum<rule>) {
      buffer = rates.momentum * buffer + direction;
      constexpr bool nesterov = rule == SgdRule::nesterov || rule == SgdRule::decay_nesterov;
      if constexpr (nesterov)
        direction = direction + rates.momentum * buffer;
      else
        direction = buffer;
    }
    if constexpr (apart) direction = direction + gradient * rates.scale;
    weight = weight - rates.lr * direction;
  }
}

}  // namespace topknot
