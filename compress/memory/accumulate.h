#pragma once
// Adds a memory's terms to the gradient, element by element, in the pass that selects; u overwrites the
// gradient. The formulas stand at FeedbackInput (compress/memory/memory.h); CPU and GPU have the same bits.

#include <cstddef>

#include "nn/base/host_device.h"
#include "nn/core/step.h"

namespace topknot {

// DGC's momentum correction, of vectors too: returns what the residual is added to; `next`: the new velocity.
template <class V>
TOPKNOT_HOST_DEVICE __attribute__((always_inline)) V momentum_corrected(V gradient, V velocity, V& next,
                                                                        float momentum, bool nesterov) {
  next = nesterov ? momentum * (velocity + gradient) : momentum * velocity + gradient;
  return nesterov ? next + gradient : next;
}

namespace cuda {

struct Accumulate {
  float* u = nullptr;               // the gradient; becomes u
  const float* residual = nullptr;  // null: nothing is added (memory none)
  const float* velocity = nullptr;  // DGC with momentum: as committed; else null
  float* next_velocity = nullptr;   // with it: of this step
  float momentum = 0;
  bool nesterov = false;
  const StepParameters* times_lr = nullptr;  // compress.lr_inside: the gradient times lr first

  // Makes u[i] and returns it; once per element and step.
  TOPKNOT_HOST_DEVICE float operator()(std::size_t i) const {
    float moved = 0;
    const float sum = made(i, moved);
    if (velocity) next_velocity[i] = moved;
    u[i] = sum;
    return sum;
  }
  // Computes u[i] without writing it.
  TOPKNOT_HOST_DEVICE float peek(std::size_t i) const {
    float moved = 0;
    return made(i, moved);
  }

  // For the range that begins at `begin`.
  TOPKNOT_HOST_DEVICE Accumulate from(std::size_t begin) const {
    Accumulate part = *this;
    part.u += begin;
    if (residual) part.residual += begin;
    if (velocity) part.velocity += begin, part.next_velocity += begin;
    return part;
  }

 private:
  TOPKNOT_HOST_DEVICE float made(std::size_t i, float& moved) const {
    float g = u[i];
    if (times_lr) g *= static_cast<float>(times_lr->lr);
    if (velocity) g = momentum_corrected(g, velocity[i], moved, momentum, nesterov);
    return residual ? g + residual[i] : g;
  }
};

}  // namespace cuda
}  // namespace topknot
