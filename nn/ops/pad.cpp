#include "nn/ops/pad.h"

namespace topknot {

Variable pad_end(const Variable& x, std::int64_t rows, std::int64_t columns, float value) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && rows >= 0 && columns >= 0,
                "pad_end: input must be [N, C, H, W], not " + in.str());
  if (rows == 0 && columns == 0) return x;
  const auto& kernels = kernels_for<PadKernels>(x);
  Tensor y = Tensor::empty({in[0], in[1], in[2] + rows, in[3] + columns}, x.value().layout(),
                           x.value().device(), x.value().dtype());
  kernels.forward(x.value(), value, y);
  return {"pad_end", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.backward(grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
