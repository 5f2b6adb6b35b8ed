#pragma once
// The update rules as arithmetic on one element, for the CPU's loops and the GPU's kernels: the slice of the
// arena that a rule changes, SGD (optim/sgd.cpp says the formulas), AdamW (optim/adamw.cpp).

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "nn/base/host_device.h"
#include "nn/core/step.h"

namespace topknot {

// The elements [offset, offset + n) of the arena. `boundaries`: where decaying elements begin to follow
// others, or the other way round, ascending, in the arena's memory; before the first if `first_decays`.
struct ArenaSlice {
  std::size_t offset, n;
  float* weights;         // of the slice
  const float* gradient;  // of the slice
  const std::uint64_t* boundaries;
  std::uint32_t boundary_count;
  bool first_decays;
};

// Which run of the arena an element lies in; runs that decay and runs that do not take turns.
class DecayRuns {
 public:
  TOPKNOT_HOST_DEVICE DecayRuns(const ArenaSlice& s, std::size_t element) : s_(s) {
    std::uint32_t end = s.boundary_count;
    while (run_ < end) {
      const std::uint32_t middle = (run_ + end) / 2;
      if (s.boundaries[middle] <= element)
        run_ = middle + 1;
      else
        end = middle;
    }
  }
  // For this element or a later one than the last.
  TOPKNOT_HOST_DEVICE bool decays(std::size_t element) {
    while (run_ < s_.boundary_count && s_.boundaries[run_] <= element) ++run_;
    return s_.first_decays != (run_ % 2 == 1);
  }
  // The end of the last element's run, or of the slice.
  std::size_t end() const {
    const std::size_t last = s_.offset + s_.n;
    return run_ < s_.boundary_count && s_.boundaries[run_] < last ? s_.boundaries[run_] : last;
  }

 private:
  const ArenaSlice& s_;
  std::uint32_t run_ = 0;
};

// On the host: update(begin, end, decays) for each run of the slice, as positions in it.
void for_decay_runs(const ArenaSlice& s, const auto& update) {
  DecayRuns runs(s, s.offset);
  for (std::size_t begin = 0; begin < s.n;) {
    const bool decays = runs.decays(s.offset + begin);
    const std::size_t end = runs.end() - s.offset;
    update(begin, end, decays);
    begin = end;
  }
}

// SGD: what a step of one element needs.
struct SgdRates {
  float lr, momentum, decay, scale;  // decay: 0 if an element does not decay
};

struct SgdOptions {
  float momentum, decay;
};

enum class SgdRule { plain, momentum, nesterov, decay_momentum, decay_nesterov, lr_applied };

template <SgdRule rule>
inline constexpr bool kHasMomentum = rule != SgdRule::plain&& rule != SgdRule::lr_applied;

inline SgdRule sgd_rule(bool momentum, bool nesterov, Applied applied) {
  if (applied == Applied::learning_rate) return SgdRule::lr_applied;
  if (!momentum) return SgdRule::plain;
  if (applied == Applied::momentum) return nesterov ? SgdRule::decay_nesterov : SgdRule::decay_momentum;
  return nesterov ? SgdRule::nesterov : SgdRule::momentum;
}

// A device's kernels. `buffer`: momenta of the slice; null for the rules without.
struct SgdKernels {
  void (*update)(SgdRule rule, const ArenaSlice& slice, float* buffer, SgdOptions options,
                 const StepState& state);
};

// T: a float, or several side by side. `buffer` is left alone by the rules without momentum.
template <SgdRule rule, class T>
TOPKNOT_HOST_DEVICE __attribute__((always_inline)) void sgd_step(T& weight, const T& gradient, T& buffer,
                                                                 const SgdRates& rates) {
  if constexpr (rule == SgdRule::lr_applied) {
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

struct AdamwConstants {
  double beta1, beta2, epsilon, weight_decay;
  double lr_factor = 1;  // of the step's learning rate
};

// A device's kernels. `first`, `second`: moments of the slice.
struct AdamwKernels {
  void (*update)(const ArenaSlice& slice, float* first, float* second, const AdamwConstants& constants,
                 const StepState& state);
};

struct AdamwRates {
  float beta1, beta2, epsilon;
  float rest1, rest2;  // 1 - beta1, 1 - beta2, of the doubles: a float's 1 - 0.999999 is 0.7 % off
  float rate;          // lr / (1 - beta1^t)
  float correction;    // 1 / sqrt(1 - beta2^t)
  float decay;         // 1 - lr * weight_decay, where an element decays
  float scale;         // of the gradient
};

// Computes the power by squaring, so that CPU and GPU have the same bits.
TOPKNOT_HOST_DEVICE double power_of(double base, std::int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2 == 1) result *= base;
  return result;
}

// `step` from 0 on.
TOPKNOT_HOST_DEVICE AdamwRates adamw_rates(const AdamwConstants& of, std::int64_t step, double step_lr,
                                           double scale) {
  const double lr = of.lr_factor * step_lr;
  return {static_cast<float>(of.beta1),
          static_cast<float>(of.beta2),
          static_cast<float>(of.epsilon),
          static_cast<float>(1 - of.beta1),
          static_cast<float>(1 - of.beta2),
          static_cast<float>(lr / (1 - power_of(of.beta1, step + 1))),
          static_cast<float>(1 / std::sqrt(1 - power_of(of.beta2, step + 1))),
          static_cast<float>(1 - lr * of.weight_decay),
          static_cast<float>(scale)};
}

TOPKNOT_HOST_DEVICE void adamw_step(float& weight, float gradient, float& first, float& second,
                                    const AdamwRates& rates, bool decays) {
  const float g = gradient * rates.scale;
  first = rates.beta1 * first + rates.rest1 * g;
  second = rates.beta2 * second + rates.rest2 * (g * g);
  const float decayed = decays ? weight * rates.decay : weight;
  weight = decayed - rates.rate * (first / (std::sqrt(second) * rates.correction + rates.epsilon));
}

}  // namespace topknot
