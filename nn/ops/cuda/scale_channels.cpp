#include "nn/ops/scale_channels.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/scale_channels_kernels.h"

namespace topknot::cuda {
namespace {

ScaleShape shape_of(const Tensor& x) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc && x.numel() < std::int64_t{1} << 32,
                "scale_channels: an nhwc activation of fewer than 2^32 elements, not " + x.shape().str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  return {word(x.dim(0)), word(x.dim(2) * x.dim(3)), word(x.dim(1))};
}

void forward(const Tensor& x, const Tensor& s, Tensor& y) {
  scale_channels(Context::current().stream(), x.dtype() == DType::bf16, x.data(), s.data(), y.data(),
                 shape_of(x));
}
void gradient_of_scale(const Tensor& x, const Tensor& dy, Tensor& ds) {
  scale_gradient(Context::current().stream(), x.dtype() == DType::bf16, x.data(), dy.data(), ds.data(),
                 shape_of(x));
}

const RegisterKernels<ScaleChannelsKernels> scale_channels_registered(DeviceKind::cuda,
                                                                      {.forward = forward,
                                                                       .scale_gradient = gradient_of_scale});

}  // namespace
}  // namespace topknot::cuda
