#include "nn/ops/shortcut.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation_kernels.h"

namespace topknot::cuda {
namespace {

ShortcutShape shape_of(const Tensor& large, const Tensor& small) {
  TOPKNOT_CHECK(large.layout() == Layout::nhwc, "subsample_and_pad on a GPU takes nhwc activations");
  TOPKNOT_CHECK(large.numel() < std::int64_t{1} << 32 && small.numel() < std::int64_t{1} << 32,
                "subsample_and_pad: fewer than 2^32 elements, not " + large.shape().str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  return {word(large.dim(0)), word(large.dim(2)), word(large.dim(3)),
          word(large.dim(1)), word(small.dim(1)), word((small.dim(1) - large.dim(1)) / 2)};
}

void forward(const Tensor& x, Tensor& y) {
  subsample_forward(Context::current().stream(), x.data(), y.data(), shape_of(x, y), size_of(y.dtype()));
}

void backward(const Tensor& dy, Tensor& dx) {
  subsample_backward(Context::current().stream(), dy.data(), dx.data(), shape_of(dx, dy),
                     size_of(dx.dtype()));
}

const RegisterKernels<ShortcutKernels> shortcut_registered(DeviceKind::cuda,
                                                           {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
