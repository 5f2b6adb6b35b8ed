#pragma once
// A device's part of Muon's class (optim/muon.cpp): the step of one matrix.

#include <array>
#include <cstddef>

#include "nn/base/host_device.h"
#include "nn/core/step.h"

namespace topknot {

inline constexpr int kNewtonSchulzSteps = 5;

// The factors a, b, c of each step of the iteration.
using NewtonSchulz = std::array<std::array<float, 3>, kNewtonSchulzSteps>;

// How a run updates its matrices; optim/muon.cpp has the formulas.
struct MuonRule {
  double momentum;
  bool averages;  // M = momentum * M + (1 - momentum) * g, else M = momentum * M + g
  bool nesterov;
  double epsilon;
  double weight_decay;
  NewtonSchulz factors;
};

// The slices of a parameter of [rows, cols].
struct MuonMatrix {
  float* weights;
  const float* gradient;
  float* momentum;
  std::size_t rows, cols;
  double shape_factor;  // of the learning rate
};

struct MuonKernels {
  // Floats of `scratch` that the step of such a matrix takes.
  std::size_t (*scratch)(std::size_t rows, std::size_t cols);
  void (*update)(const MuonMatrix& matrix, const MuonRule& rule, float* scratch, const StepState& state);
};

// M of an element, and what is made orthogonal. T: a float, or several side by side.
struct MuonMix {
  explicit TOPKNOT_HOST_DEVICE MuonMix(const MuonRule& rule)
      : momentum(static_cast<float>(rule.momentum)),
        gradient(rule.averages ? static_cast<float>(1 - rule.momentum) : 1.0f),
        nesterov(rule.nesterov) {}

  template <class T>
  TOPKNOT_HOST_DEVICE __attribute__((always_inline)) T input(T& of_momentum, const T& of_gradient) const {
    const T added = gradient * of_gradient;
    of_momentum = momentum * of_momentum + added;
    return nesterov ? added + momentum * of_momentum : of_momentum;
  }

  float momentum, gradient;
  bool nesterov;
};

// w = decay * w - rate * (the orthogonal matrix)
struct MuonRates {
  TOPKNOT_HOST_DEVICE MuonRates(const MuonRule& rule, double shape_factor, double lr)
      : rate(static_cast<float>(lr * shape_factor)), decay(static_cast<float>(1 - lr * rule.weight_decay)) {}
  float rate, decay;
};

}  // namespace topknot
