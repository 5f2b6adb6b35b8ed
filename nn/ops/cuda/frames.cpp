#include "nn/ops/frames.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/frames_kernels.h"

namespace topknot::cuda {
namespace {

FramesShape frames_shape(const Tensor& x) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "frames_to_rows on a GPU takes nhwc activations");
  return {x.dim(0), x.dim(1), x.dim(2), x.dim(3)};
}

void gather_frames(const Tensor& x, Tensor& rows) {
  move_frames(Context::current().stream(), true, x.data(), rows.data(), frames_shape(x), size_of(x.dtype()));
}
void scatter_frames(const Tensor& rows, Tensor& x) {
  move_frames(Context::current().stream(), false, rows.data(), x.data(), frames_shape(x), size_of(x.dtype()));
}

const RegisterKernels<FramesKernels> frames_registered(DeviceKind::cuda,
                                                       {.gather = gather_frames, .scatter = scatter_frames});

}  // namespace
}  // namespace topknot::cuda
