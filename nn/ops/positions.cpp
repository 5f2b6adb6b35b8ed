// Learned positions. Reads x and writes y once each: 8 bytes an element in f32; the weight is small against
// them. The backward pass reads dy once, and hands it on as dx.

#include <fmt/format.h>

#include <algorithm>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable add_positions(const Variable& x, std::int64_t batch, const Variable& weight) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(in.rank() == 2 && w.rank() == 2 && in[1] == w[1] && batch > 0 && in[0] % batch == 0 &&
                    in.numel() > 0 && in[0] / batch <= w[0],
                fmt::format("add_positions: {} of a batch of {}, positions {}", in.str(), batch, w.str()));
  const auto& kernels = kernels_for<PositionsKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(x.value(), batch, weight.value(), y);
  return {"add_positions", y, {x, weight}, [=, &kernels](Tensor dy) {
            if (const GradientTarget target = weight.gradient_target(); target.data)
              kernels.weight_gradient(dy, batch, weight.shape()[0], target);
            x.accumulate_grad(std::move(dy));
          }};
}

namespace {

void forward(const Tensor& x, std::int64_t batch, const Tensor& weight, Tensor& y) {
  const std::int64_t width = x.dim(1);
  by_type(x.dtype(), [&]<class T>(T) {
    parallel_each(x.dim(0), [&](std::int64_t row) {
      const T* from = x.as<T>() + row * width;
      const float* position = weight.data() + row / batch * width;
      T* to = y.as<T>() + row * width;
      for (std::int64_t j = 0; j < width; ++j) narrow(widened(from[j]) + position[j], to[j]);
    });
  });
}

void weight_gradient(const Tensor& dy, std::int64_t batch, std::int64_t positions,
                     const GradientTarget& weight) {
  const std::int64_t width = dy.dim(1), steps = dy.dim(0) / batch;
  by_type(dy.dtype(), [&]<class T>(T) {
    parallel_ranges(positions, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        float* to = weight.data + t * width;
        if (!weight.accumulate) std::fill_n(to, width, 0.0f);
        if (t >= steps) continue;
        for (std::int64_t row = t * batch; row < (t + 1) * batch; ++row)
          for (std::int64_t j = 0; j < width; ++j) to[j] += widened(dy.as<T>()[row * width + j]);
      }
    });
  });
}

const bool positions_registered =
    add_cpu_kernels<PositionsKernels>({.forward = forward, .weight_gradient = weight_gradient});

}  // namespace
}  // namespace topknot
