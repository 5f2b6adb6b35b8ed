#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "nn/core/pass_cost.h"
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable lookahead(const Variable& x, std::int64_t batch, const Variable& weight) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(
      in.rank() == 2 && w.rank() == 2 && in[1] == w[0] && w[1] > 0 && batch > 0 && in[0] % batch == 0,
      fmt::format("lookahead: input {} of {} sequences, weight {}", in.str(), batch, w.str()));
  if (needs_f32(x)) return cast(lookahead(cast(x, DType::f32), batch, weight), DType::bf16);
  const auto& kernels = kernels_for<LookaheadKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  const double flops = 2.0 * static_cast<double>(in.numel() * w[1]);
  PassCost::add_flops(flops);
  kernels.filter(x.value(), weight.value(), batch, y);
  return {"lookahead", y, {x, weight}, [=, &kernels](Tensor grad) {
            PassCost::add_flops(flops * (weight.requires_grad() + x.requires_grad()));
            if (weight.requires_grad()) {
              Tensor dw = Tensor::empty_like(weight.value());
              kernels.weight_gradient(x.value(), grad, batch, dw);
              write_gradient(weight.gradient_target(), dw);
            }
            if (!x.requires_grad()) return;
            Tensor dx = Tensor::empty_like(x.value());
            kernels.filter(grad, weight.value(), -batch, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

namespace {

// Rows [begin, end) of y; w: [taps][features].
TOPKNOT_MULTIVERSION void lookahead_rows(const float* x, const float* w, float* y, std::int64_t begin,
                                         std::int64_t end, std::int64_t rows, std::int64_t features,
                                         std::int64_t taps, std::int64_t shift) {
  for (std::int64_t row = begin; row < end; ++row) {
    float* out = y + row * features;
    for (std::int64_t f = 0; f < features; ++f) out[f] = w[f] * x[row * features + f];
    for (std::int64_t j = 1; j < taps; ++j) {
      const std::int64_t from = row + j * shift;
      if (from < 0 || from >= rows) break;
      const float *in = x + from * features, *weight = w + j * features;
      for (std::int64_t f = 0; f < features; ++f) out[f] += weight[f] * in[f];
    }
  }
}

// sum_row a[row] b[row], by feature.
TOPKNOT_MULTIVERSION void lookahead_products(const float* a, const float* b, std::int64_t rows,
                                             std::int64_t features, double* sums) {
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t f = 0; f < features; ++f)
      sums[f] += static_cast<double>(a[row * features + f]) * static_cast<double>(b[row * features + f]);
}

void lookahead_filter(const Tensor& x, const Tensor& weight, std::int64_t shift, Tensor& y) {
  const std::int64_t rows = x.dim(0), features = weight.dim(0), taps = weight.dim(1);
  std::vector<float> by_tap(static_cast<std::size_t>(weight.numel()));
  for (std::int64_t f = 0; f < features; ++f)
    for (std::int64_t j = 0; j < taps; ++j)
      by_tap[static_cast<std::size_t>(j * features + f)] = weight.data()[f * taps + j];
  parallel_ranges(rows, [&](int, std::int64_t begin, std::int64_t end) {
    lookahead_rows(x.data(), by_tap.data(), y.data(), begin, end, rows, features, taps, shift);
  });
}

// Sums in double, in the order of rows: the same for any number of threads.
void lookahead_weight_gradient(const Tensor& x, const Tensor& dy, std::int64_t batch, Tensor& dw) {
  const std::int64_t rows = x.dim(0), features = dw.dim(0), taps = dw.dim(1);
  parallel_ranges(taps, [&](int, std::int64_t begin, std::int64_t end) {
    std::vector<double> sums(static_cast<std::size_t>(features));
    for (std::int64_t j = begin; j < end; ++j) {
      std::fill(sums.begin(), sums.end(), 0.0);
      lookahead_products(dy.data(), x.data() + std::min(j * batch, rows) * features,
                         std::max<std::int64_t>(0, rows - j * batch), features, sums.data());
      for (std::int64_t f = 0; f < features; ++f)
        dw.data()[f * taps + j] = static_cast<float>(sums[static_cast<std::size_t>(f)]);
    }
  });
}

const bool lookahead_registered = add_cpu_kernels<LookaheadKernels>(
    {.filter = lookahead_filter, .weight_gradient = lookahead_weight_gradient});

}  // namespace
}  // namespace topknot
