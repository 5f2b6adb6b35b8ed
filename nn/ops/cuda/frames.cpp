#include "nn/ops/frames.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/frames_kernels.h"

namespace topknot::cuda {
namespace {

FramesShape frames_shape(const Tensor& x) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "pictures of sound on a GPU are nhwc activations");
  return {x.dim(0), x.dim(1), x.dim(2), x.dim(3)};
}

void gather_frames(const Tensor& x, Tensor& rows) {
  move_frames(Context::current().stream(), true, x.data(), rows.data(), frames_shape(x), size_of(x.dtype()));
}
void scatter_frames(const Tensor& rows, Tensor& x) {
  move_frames(Context::current().stream(), false, rows.data(), x.data(), frames_shape(x), size_of(x.dtype()));
}

void mask(const Tensor& x, std::span<const std::int32_t> frames, Tensor& y) {
  const auto sequences = static_cast<std::int64_t>(frames.size());
  // Rows lie in T, N, F order: F channels of height 1.
  const bool rows = x.shape().rank() == 2;
  const FramesShape shape =
      rows ? FramesShape{sequences, x.dim(1), 1, x.dim(0) / sequences} : frames_shape(x);
  mask_frames(Context::current().stream(), rows, x.data(), frames.data(), y.data(), shape,
              size_of(x.dtype()));
}

const RegisterKernels<MaskFramesKernels> mask_registered(DeviceKind::cuda, {.mask = mask});
const RegisterKernels<FramesKernels> frames_registered(DeviceKind::cuda,
                                                       {.gather = gather_frames, .scatter = scatter_frames});

}  // namespace
}  // namespace topknot::cuda
