#pragma once
// The memory of layer_norm and rms_norm, by rows, as the kernels of either device see it.

#include "nn/ops/kernels.h"

namespace topknot {

// left, branch, bias: null if there are none.
template <class T>
struct NormRows {
  NormRows(NormCall& call, const Tensor& left_, const Tensor& branch_, Tensor& y_, Tensor& statistics)
      : x(call.x.as<T>()),
        y(y_.as<T>()),
        left(left_.as<T>()),
        branch(branch_.as<T>()),
        weight(call.weight.data()),
        bias(call.bias.data()),
        mean(statistics.data()),
        inverse(mean + call.x.dim(0)),
        rows(call.x.dim(0)),
        width(call.x.dim(1)),
        epsilon(call.epsilon) {}

  T *x, *y;
  const T *left, *branch;
  const float *weight, *bias;
  float *mean, *inverse;  // by row
  std::int64_t rows, width;
  float epsilon;
};

// The inputs of the backward pass, and dx, which is null if it is not wanted.
template <class T>
struct NormGradientRows {
  NormGradientRows(const NormCall& call, const Tensor& statistics, const Tensor& dy_, InputGradient& out)
      : x(call.x.as<T>()),
        dy(dy_.as<T>()),
        weight(call.weight.data()),
        mean(statistics.data()),
        inverse(mean + call.x.dim(0)),
        dx(out.tensor.as<T>()),
        accumulate(out.accumulate),
        rows(call.x.dim(0)),
        width(call.x.dim(1)) {}

  const T *x, *dy;
  const float *weight, *mean, *inverse;
  T* dx;
  bool accumulate;  // dx += instead of dx =
  std::int64_t rows, width;
};

}  // namespace topknot
