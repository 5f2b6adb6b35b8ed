#include "nn/ops/kernels.h"

namespace topknot {

Variable pool(const Variable& x, const PoolGeometry& g) {
  TOPKNOT_CHECK(g.window > 0 && g.stride > 0 && g.padding >= 0 && g.padding < g.window,
                "pool: window and stride must be positive, the padding smaller than the window");
  const Tensor& in = x.value();
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4, "pool: input must be [N, C, H, W], not " + shape.str());
  TOPKNOT_CHECK(shape[2] + 2 * g.padding >= g.window && shape[3] + 2 * g.padding >= g.window,
                "pool: a window larger than " + shape.str());
  const auto& kernels = kernels_for<PoolKernels>(x);
  Tensor y = Tensor::empty({shape[0], shape[1], g.output_size(shape[2]), g.output_size(shape[3])},
                           in.layout(), in.device(), in.dtype());
  const OpState state = kernels.forward(g, in, y);
  return {"pool", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.backward(g, state, x.value(), y, grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

Variable global_average_pool(const Variable& x) {
  const Tensor& in = x.value();
  TOPKNOT_CHECK(x.shape().rank() == 4,
                "global_average_pool: input must be [N, C, H, W], not " + x.shape().str());
  const auto& kernels = kernels_for<GlobalAveragePoolKernels>(x);
  Tensor y = Tensor::empty({in.dim(0), in.dim(1)}, Layout::plain, in.device(), in.dtype());
  kernels.forward(in, y);
  return {"global_average_pool", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.backward(grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
