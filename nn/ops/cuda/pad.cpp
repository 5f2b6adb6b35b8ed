#include "nn/ops/pad.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/pad_kernels.h"

namespace topknot::cuda {
namespace {

PadShape shape_of(const Tensor& small, const Tensor& large) {
  TOPKNOT_CHECK(small.layout() == Layout::nhwc && large.numel() < std::int64_t{1} << 32,
                "pad_end: an nhwc activation of fewer than 2^32 elements, not " + large.shape().str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  return {word(small.dim(0)), word(small.dim(1)), word(small.dim(2)),
          word(small.dim(3)), word(large.dim(2)), word(large.dim(3))};
}

void forward(const Tensor& x, float value, Tensor& y) {
  pad_forward(Context::current().stream(), x.dtype() == DType::bf16, x.data(), y.data(), shape_of(x, y),
              value);
}
void backward(const Tensor& dy, Tensor& dx) {
  pad_backward(Context::current().stream(), dx.dtype() == DType::bf16, dy.data(), dx.data(),
               shape_of(dx, dy));
}

const RegisterKernels<PadKernels> pad_registered(DeviceKind::cuda,
                                                 {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
