#pragma once
// The pass of DGC's memory (compress/memory/dgc.h) over elements [begin, end).

#include <cstddef>

namespace topknot::dgc {

template <class T>
struct Arrays {
  T* gradient;        // becomes v
  const T* residual;  // v of the last step
  const T* velocity;
  T* next;  // the new velocity; 64-byte aligned, as is velocity
};

// `begin` is a multiple of 16. Overloads, because templates cannot be compiled for several targets.
void step_part(const Arrays<float>& arrays, std::size_t begin, std::size_t end, float momentum,
               bool nesterov);
void step_part(const Arrays<double>& arrays, std::size_t begin, std::size_t end, double momentum,
               bool nesterov);

}  // namespace topknot::dgc
