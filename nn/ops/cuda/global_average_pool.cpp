#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/global_average_pool_kernels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {

Variable global_average_pool(const Variable& x) {
  const Tensor& in = x.value();
  // Images are a dimension of the grid, and an image's elements are counted in 32 bits.
  TOPKNOT_CHECK(in.layout() == Layout::nhwc && in.numel() > 0 && in.dim(0) <= 65535 &&
                    in.numel() / in.dim(0) < std::int64_t{1} << 31,
                "global_average_pool: 1 to 65,535 images in nhwc order, not " + in.shape().str());
  const AveragePoolShape shape{static_cast<std::uint32_t>(in.dim(0)),
                               static_cast<std::uint32_t>(in.dim(2) * in.dim(3)),
                               static_cast<std::uint32_t>(in.dim(1))};
  const bool bf16 = in.dtype() == DType::bf16;
  Tensor y = Tensor::empty({in.dim(0), in.dim(1)}, Layout::plain, in.device(), in.dtype());
  average_pool_forward(Context::current().stream(), bf16, in.data(), y.data(), shape);
  return {"global_average_pool", y, {x}, [=](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            average_pool_backward(Context::current().stream(), bf16, grad.data(), dx.data(), shape);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot::cuda
