#pragma once
// What a memory leaves to be added to the gradient in the pass that selects, on a CPU.

#include <cstddef>
#include <span>
#include <type_traits>

#include "compress/memory/accumulate.h"

namespace topknot {

// u = g, or g + residual, or with a velocity momentum_corrected(g) + residual, over the gradient g.
template <class T>
struct Addend {
  std::span<const T> residual;  // as long as the gradient; empty: nothing is added
  const T* velocity = nullptr;  // DGC with momentum: as committed; else null
  T* next_velocity = nullptr;   // with it: of this step
  T momentum = 0;
  bool nesterov = false;

  Addend() = default;
  template <class Residual>
  requires std::is_convertible_v<Residual, std::span<const T>> Addend(Residual&& residual_)
      : residual(residual_) {}

  // What u[i] will be.
  T made(std::span<const T> gradient, std::size_t i) const {
    T sum = gradient[i], moved = 0;
    if (velocity) sum = momentum_corrected(sum, velocity[i], moved, momentum, nesterov);
    return residual.empty() ? sum : sum + residual[i];
  }
  void prefetch(std::size_t i) const {
    if (!residual.empty()) __builtin_prefetch(residual.data() + i);
    if (velocity) __builtin_prefetch(velocity + i);
  }
  // For a range of the gradient.
  Addend part(std::size_t begin, std::size_t size) const {
    Addend part = *this;
    if (!residual.empty()) part.residual = residual.subspan(begin, size);
    if (velocity) part.velocity += begin, part.next_velocity += begin;
    return part;
  }
  // u becomes the sum: for selectors without a pass of their own (compress/select/passes/passes.h).
  void add_to(std::span<T> u) const;
  // Makes u[begin, end) where there is a velocity, and returns null. Else returns what is still to be added to u; null for
  // nothing.
  const T* add_velocity(std::span<T> u, std::size_t begin, std::size_t end) const;
};

}  // namespace topknot
