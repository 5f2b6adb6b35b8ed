#pragma once
// The inner step of a pass that adds a velocity (compress/memory/feedback_input.h), for loops compiled for several instruction sets.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "compress/memory/feedback_input.h"
#include "nn/core/simd.h"

namespace topknot {

typedef float Floats __attribute__((vector_size(64)));

template <bool kNesterov, bool kAligned>
struct VelocityStep {
  float* u;
  const float *residual, *velocity;
  float* next;  // aligned to 64 bytes from the loop's first element on, where kAligned
  float momentum;

  // Makes 64 bytes of u from u[i] on, and returns them.
  TOPKNOT_INLINE Floats vector(std::size_t i) const {
    Floats x, added, old, moved;
    std::memcpy(&x, u + i, sizeof x);
    std::memcpy(&added, residual + i, sizeof added);
    std::memcpy(&old, velocity + i, sizeof old);
    x = added + momentum_corrected(x, old, moved, momentum, kNesterov);
    std::memcpy(u + i, &x, sizeof x);
    if constexpr (kAligned)
      stream(next + i, moved);  // not read in this step
    else
      std::memcpy(next + i, &moved, sizeof moved);
    return x;
  }
  TOPKNOT_INLINE void one(std::size_t i) const {
    u[i] = residual[i] + momentum_corrected(u[i], velocity[i], next[i], momentum, kNesterov);
  }
};

// Calls body with the VelocityStep for a loop from `begin` on.
template <class Body>
TOPKNOT_INLINE void with_velocity_step(float* u, const FeedbackInput& a, std::size_t begin, Body&& body) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(a.next_velocity + begin) % 64 == 0;
  const float* residual = a.residual.data();
  if (a.nesterov && aligned)
    body(VelocityStep<true, true>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else if (a.nesterov)
    body(VelocityStep<true, false>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else if (aligned)
    body(VelocityStep<false, true>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else
    body(VelocityStep<false, false>{u, residual, a.velocity, a.next_velocity, a.momentum});
  finish_streaming();
}

}  // namespace topknot
