#include "nn/ops/kernels.h"

namespace topknot {

Variable local_response_norm(const Variable& x, const LrnOptions& options) {
  TOPKNOT_CHECK(x.shape().rank() == 4,
                "local_response_norm: input must be [N, C, H, W], not " + x.shape().str());
  TOPKNOT_CHECK(options.size > 0 && options.size % 2 == 1 && options.k > 0 && options.alpha >= 0,
                "local_response_norm: an odd number of channels, a positive k, alpha at least 0");
  if (needs_f32(x)) return cast(local_response_norm(cast(x, DType::f32), options), DType::bf16);
  const auto& kernels = kernels_for<LrnKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  const OpState state = kernels.forward(options, x.value(), y);
  return {"local_response_norm", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.backward(options, state, x.value(), grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
