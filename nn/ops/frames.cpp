#include "nn/ops/frames.h"

#include "nn/ops/layout.h"

namespace topknot {

Variable frames_to_rows(const Variable& x) {
  const Tensor& in = x.value();
  TOPKNOT_CHECK(x.shape().rank() == 4, "frames_to_rows: input must be [N, C, H, T], not " + x.shape().str());
  if (needs_f32(x)) return cast(frames_to_rows(cast(x, DType::f32)), DType::bf16);
  const auto& kernels = kernels_for<FramesKernels>(x);
  Tensor rows =
      Tensor::empty({in.dim(3) * in.dim(0), in.dim(1) * in.dim(2)}, Layout::plain, in.device(), in.dtype());
  kernels.gather(in, rows);
  return {"frames_to_rows", rows, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.scatter(grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

Variable mask_frames(const Variable& x, std::span<const std::int32_t> frames) {
  if (frames.empty()) return x;
  const Shape shape = x.shape();
  const auto sequences = static_cast<std::int64_t>(frames.size());
  TOPKNOT_CHECK(
      shape.rank() == 4 ? shape[0] == sequences : shape.rank() == 2 && shape[0] % sequences == 0,
      "mask_frames: input must be [N, C, H, T] or [T * N, F] with one number of frames for each of N, not " +
          shape.str());
  const auto& kernels = kernels_for<MaskFramesKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.mask(x.value(), frames, y);
  return {"mask_frames", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            kernels.mask(grad, frames, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

Variable rows_to_images(const Variable& x) {
  const Shape flat = x.shape();
  TOPKNOT_CHECK(flat.rank() == 2, "rows_to_images: input must be [M, F], not " + flat.str());
  const bool gpu = x.value().device().kind == DeviceKind::cuda;
  const Tensor images = x.value().reshaped({flat[0], flat[1], 1, 1});
  return {"rows_to_images", gpu ? to_layout(images, Layout::nhwc) : images, {x}, [=](Tensor grad) {
            x.accumulate_grad(to_layout(grad, Layout::plain).reshaped(flat));
          }};
}

}  // namespace topknot
