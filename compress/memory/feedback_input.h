#pragma once
// What a memory leaves to be added to the gradient in the pass that selects, on a CPU.

#include <cstddef>
#include <span>
#include <type_traits>

#include "compress/memory/accumulate.h"

namespace topknot {

// u = g, or g + residual, or with a velocity momentum_corrected(g) + residual, over the gradient g.
struct FeedbackInput {
  std::span<const float> residual;  // as long as the gradient; empty: nothing is added
  const float* velocity = nullptr;  // DGC with momentum: as committed; else null
  float* next_velocity = nullptr;   // with it: of this step
  float momentum = 0;
  bool nesterov = false;

  FeedbackInput() = default;
  template <class Residual>
  requires std::is_convertible_v<Residual, std::span<const float>> FeedbackInput(Residual&& residual_)
      : residual(residual_) {}

  // What u[i] will be.
  float made(std::span<const float> gradient, std::size_t i) const {
    float sum = gradient[i], moved = 0;
    if (velocity) sum = momentum_corrected(sum, velocity[i], moved, momentum, nesterov);
    return residual.empty() ? sum : sum + residual[i];
  }
  void prefetch(std::size_t i) const {
    if (!residual.empty()) __builtin_prefetch(residual.data() + i);
    if (velocity) __builtin_prefetch(velocity + i);
  }
  // For a range of the gradient.
  FeedbackInput part(std::size_t begin, std::size_t size) const {
    FeedbackInput part = *this;
    if (!residual.empty()) part.residual = residual.subspan(begin, size);
    if (velocity) part.velocity += begin, part.next_velocity += begin;
    return part;
  }
  // u becomes the sum: for selectors without a pass of their own (compress/select/passes/passes.h).
  void add_to(std::span<float> u) const;
  // Makes u[begin, end) where there is a velocity, and returns null. Else returns what is still to be added to u; null for
  // nothing.
  const float* add_velocity(std::span<float> u, std::size_t begin, std::size_t end) const;
};

}  // namespace topknot
