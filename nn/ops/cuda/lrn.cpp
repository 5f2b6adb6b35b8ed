#include "nn/ops/lrn.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/lrn_kernels.h"

namespace topknot::cuda {
namespace {

LrnShape shape_of(const LrnOptions& o, const Tensor& x) {
  TOPKNOT_CHECK(
      x.layout() == Layout::nhwc && x.numel() < std::int64_t{1} << 32,
      "local_response_norm: an nhwc activation of fewer than 2^32 elements, not " + x.shape().str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  return {word(x.numel()), word(x.dim(1)), word(o.size / 2), o.alpha, o.beta, o.k};
}

OpState forward(const LrnOptions& options, const Tensor& x, Tensor& y) {
  lrn_forward(Context::current().stream(), x.dtype() == DType::bf16, x.data(), y.data(),
              shape_of(options, x));
  return nullptr;
}
void backward(const LrnOptions& options, const OpState&, const Tensor& x, const Tensor& dy, Tensor& dx) {
  lrn_backward(Context::current().stream(), x.dtype() == DType::bf16, x.data(), dy.data(), dx.data(),
               shape_of(options, x));
}

const RegisterKernels<LrnKernels> lrn_registered(DeviceKind::cuda,
                                                 {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
