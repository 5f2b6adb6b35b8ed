#include "nn/ops/scale_channels.h"

namespace topknot {

Variable scale_channels(const Variable& x, const Variable& s) {
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4 && s.shape() == Shape({shape[0], shape[1]}),
                "scale_channels: " + s.shape().str() + " for " + shape.str());
  const auto& kernels = kernels_for<ScaleChannelsKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(x.value(), s.value(), y);
  return {"scale_channels", y, {x, s}, [=, &kernels](Tensor grad) {
            if (s.requires_grad()) {
              Tensor ds = Tensor::empty_like(s.value());
              kernels.scale_gradient(x.value(), grad, ds);
              s.accumulate_grad(std::move(ds));
            }
            if (!x.requires_grad()) return;
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            kernels.forward(grad, s.value(), dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
