#include "compress/memory/dgc_kernels.h"

#include <cstring>

#include "nn/core/simd.h"
#include "nn/core/stream.h"

namespace topknot::dgc {
namespace {

template <class T>
struct Vec;
template <>
struct Vec<float> {
  typedef float type __attribute__((vector_size(64)));
};
template <>
struct Vec<double> {
  typedef double type __attribute__((vector_size(64)));
};

template <bool kNesterov, class V, class T>
TOPKNOT_INLINE void step_lanes(V& gradient, const V& residual, const V& velocity, V& next, T momentum) {
  if constexpr (kNesterov) {
    next = momentum * (velocity + gradient);
    gradient = residual + (next + gradient);
  } else {
    next = momentum * velocity + gradient;
    gradient = residual + next;
  }
}

template <bool kNesterov, class T>
TOPKNOT_INLINE void step_body(const Arrays<T>& a, std::size_t begin, std::size_t end, T momentum) {
  using V = typename Vec<T>::type;
  constexpr std::size_t width = 64 / sizeof(T);
  std::size_t i = begin;
  for (; i + width <= end; i += width) {
    V gradient, residual, velocity, next;
    std::memcpy(&gradient, a.gradient + i, sizeof gradient);
    std::memcpy(&residual, a.residual + i, sizeof residual);
    std::memcpy(&velocity, a.velocity + i, sizeof velocity);
    step_lanes<kNesterov>(gradient, residual, velocity, next, momentum);
    std::memcpy(a.gradient + i, &gradient, sizeof gradient);
    stream(a.next + i, next);  // nobody reads it in this step
  }
  for (; i < end; ++i)
    step_lanes<kNesterov>(a.gradient[i], a.residual[i], a.velocity[i], a.next[i], momentum);
  finish_streaming();
}

}  // namespace

TOPKNOT_MULTIVERSION void step_part(const Arrays<float>& arrays, std::size_t begin, std::size_t end,
                                    float momentum, bool nesterov) {
  nesterov ? step_body<true>(arrays, begin, end, momentum) : step_body<false>(arrays, begin, end, momentum);
}
TOPKNOT_MULTIVERSION void step_part(const Arrays<double>& arrays, std::size_t begin, std::size_t end,
                                    double momentum, bool nesterov) {
  nesterov ? step_body<true>(arrays, begin, end, momentum) : step_body<false>(arrays, begin, end, momentum);
}

}  // namespace topknot::dgc
