#include "nn/ops/shortcut.h"

namespace topknot {

Variable subsample_and_pad(const Variable& x, std::int64_t channels) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && channels >= in[1], "subsample_and_pad: " + in.str() + " to fewer channels");
  const auto& kernels = kernels_for<ShortcutKernels>(x);
  Tensor y = Tensor::empty({in[0], channels, (in[2] + 1) / 2, (in[3] + 1) / 2}, x.value().layout(),
                           x.value().device(), x.value().dtype());
  kernels.forward(x.value(), y);
  return {"subsample_and_pad", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.backward(grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
