#include "nn/ops/cpu/pointwise.h"

#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/gemm.h"
#include "nn/ops/kernels.h"

namespace topknot {

bool PointwiseConv::serves(const Tensor& x) const {
  return g_.kernel == 1 && g_.stride == 1 && g_.padding == 0 && g_.groups == 1 &&
         x.layout() == Layout::plain && x.dtype() == DType::f32 && x.dim(0) >= team_size() &&
         g_.out % channel_block() != 0;
}

void PointwiseConv::forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const {
  const std::int64_t pixels = x.dim(2) * x.dim(3), in = g_.in * pixels, out = g_.out * pixels;
  const ProductForm one{.m = g_.out, .n = pixels, .k = g_.in, .type = DType::f32};
  parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      sgemm(one, weight, x.data() + n * in, y.data() + n * out);
      if (after) after(n, n + 1);
    }
  });
}

void PointwiseConv::backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                             GradientTarget weight_gradient, InputGradient& input_gradient) const {
  const std::int64_t pixels = x.dim(2) * x.dim(3), in = g_.in * pixels, out = g_.out * pixels;
  const ProductForm of_input{.m = g_.in,
                             .n = pixels,
                             .k = g_.out,
                             .type = DType::f32,
                             .a_transposed = true,
                             .add = input_gradient.accumulate};
  const ProductForm of_weight{
      .m = g_.out, .n = g_.in, .k = pixels, .type = DType::f32, .b_transposed = true, .add = true};
  const Tensor plain_grad = grad.defined() ? to_layout(grad, Layout::plain) : grad;
  std::vector<Tensor> sums(static_cast<std::size_t>(team_size()));  // of the weight's gradient, by thread
  parallel_ranges(x.dim(0), [&](int thread, std::int64_t begin, std::int64_t end) {
    Tensor filled, &sum = sums[static_cast<std::size_t>(thread)];
    if (!grad.defined()) filled = Tensor::empty({out});
    if (weight_gradient.data) sum = Tensor::zeros({g_.out * g_.in});
    for (std::int64_t n = begin; n < end; ++n) {
      if (filled.defined()) fill(n, n + 1, filled.data());
      const float* dy = filled.defined() ? filled.data() : plain_grad.data() + n * out;
      if (sum.defined()) sgemm(of_weight, dy, x.data() + n * in, sum.data());
      if (input_gradient.tensor.defined()) sgemm(of_input, weight, dy, input_gradient.tensor.data() + n * in);
    }
  });
  if (!weight_gradient.data) return;
  for (std::size_t t = 1; t < sums.size(); ++t)
    if (sums[t].defined())
      for (std::int64_t i = 0; i < sums[0].numel(); ++i) sums[0].data()[i] += sums[t].data()[i];
  write_gradient(weight_gradient, sums[0]);
}

}  // namespace topknot
