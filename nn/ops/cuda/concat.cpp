#include "nn/ops/concat.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/concat_kernels.h"

namespace topknot::cuda {
namespace {

Layout layout(const Tensor&, const ChannelRun&, std::int64_t) {
  return Layout::nhwc;
}

void copy(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  TOPKNOT_CHECK(
      x.layout() == Layout::nhwc && y.layout() == Layout::nhwc && x.numel() < std::int64_t{1} << 32 &&
          y.numel() < std::int64_t{1} << 32,
      "channels are copied in nhwc activations of fewer than 2^32 elements, not " + x.shape().str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  copy_channels(Context::current().stream(), x.dtype() == DType::bf16, x.data(), y.data(),
                {word(x.numel() / x.dim(1)), word(run.count), word(x.dim(1)), word(run.from),
                 word(run.from_step), word(y.dim(1)), word(run.to), word(run.to_step)},
                accumulate);
}

const RegisterKernels<ChannelCopyKernels> concat_registered(DeviceKind::cuda,
                                                            {.layout = layout, .copy = copy});

}  // namespace
}  // namespace topknot::cuda
