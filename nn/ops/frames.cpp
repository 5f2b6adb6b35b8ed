#include <cstring>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

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
  return op_on("mask_frames", x, y,
               [=, &kernels](const Tensor& grad, Tensor& dx) { kernels.mask(grad, frames, dx); });
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

namespace {

// Calls fn(element of x in memory, element of rows) for each element; images are shared out over the threads.
void each_frame_element(const Tensor& x, const auto& fn) {
  const ChannelGeometry g(x);
  const std::int64_t height = x.dim(2), frames = x.dim(3), features = x.dim(1) * height;
  parallel_each(g.images, [&](std::int64_t n) {
    for (std::int64_t c = 0; c < g.channels; ++c) {
      const std::int64_t block = c / g.block * g.block;
      const std::int64_t from = n * g.image_elements() + block * g.pixels + c % g.block;
      for (std::int64_t h = 0; h < height; ++h)
        for (std::int64_t t = 0; t < frames; ++t)
          fn(from + (h * frames + t) * g.block, (t * g.images + n) * features + c * height + h);
    }
  });
}

void frames_gather(const Tensor& x, Tensor& rows) {
  const float* in = x.data();
  float* out = rows.data();
  each_frame_element(x, [=](std::int64_t from, std::int64_t to) { out[to] = in[from]; });
}
void frames_scatter(const Tensor& rows, Tensor& x) {
  const float* in = rows.data();
  float* out = x.data();
  each_frame_element(x, [=](std::int64_t to, std::int64_t from) { out[to] = in[from]; });
}

// Frames [0, kept) of a run of `count`, each of `bytes`; zeros after them.
void copy_run(const std::byte* from, std::byte* to, std::int64_t kept, std::int64_t count,
              std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(kept * bytes));
  std::memset(to + kept * bytes, 0, static_cast<std::size_t>((count - kept) * bytes));
}

void mask(const Tensor& x, std::span<const std::int32_t> frames, Tensor& y) {
  const auto* from = reinterpret_cast<const std::byte*>(x.data());
  auto* to = reinterpret_cast<std::byte*>(y.data());
  const auto element = static_cast<std::int64_t>(size_of(x.dtype()));
  const auto sequences = static_cast<std::int64_t>(frames.size());
  const bool rows = x.shape().rank() == 2;
  const std::int64_t count = rows ? x.dim(0) / sequences : x.dim(3);
  for (const std::int32_t kept : frames)
    TOPKNOT_CHECK(kept >= 0 && kept <= count, "mask_frames: more frames than there are");
  if (rows) {
    const std::int64_t row = x.dim(1) * element;
    parallel_ranges(count, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin * sequences; i < end * sequences; ++i)
        copy_run(from + i * row, to + i * row, i / sequences < frames[i % sequences], 1, row);
    });
    return;
  }
  const ChannelGeometry g(x);
  const std::int64_t frame = g.block * element, run = count * frame,
                     runs = g.image_elements() * element / run;
  parallel_ranges(sequences, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * runs; i < end * runs; ++i)
      copy_run(from + i * run, to + i * run, frames[i / runs], count, frame);
  });
}

const bool mask_registered = add_cpu_kernels<MaskFramesKernels>({.mask = mask});
const bool frames_registered =
    add_cpu_kernels<FramesKernels>({.gather = frames_gather, .scatter = frames_scatter});

}  // namespace
}  // namespace topknot
