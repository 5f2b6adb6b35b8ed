#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

struct FramesShape {
  std::int64_t images, channels, height, frames;
  __device__ std::int64_t size() const { return images * channels * height * frames; }
};

FramesShape shape_of(const Tensor& x) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "pictures of sound on a GPU are nhwc activations");
  return {x.dim(0), x.dim(1), x.dim(2), x.dim(3)};
}

// fn(W()) with an integer of the size of x's elements, 2 or 4 bytes.
void by_element_size(const Tensor& x, const auto& fn) {
  if (size_of(x.dtype()) == 2)
    fn(std::uint16_t{});
  else
    fn(std::uint32_t{});
}

// x lies in N, H, T, C order, rows in T, N, C, H order. `gather`: from x to rows, else back. A thread per
// element of x; neighbours are neighbours there.
template <class W>
__global__ void __launch_bounds__(kThreads) frames_kernel(bool gather, const W* from, W* to, FramesShape s) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= s.size()) return;
  const std::int64_t c = i % s.channels, t = i / s.channels % s.frames,
                     h = i / s.channels / s.frames % s.height, n = i / s.channels / s.frames / s.height;
  const std::int64_t row = ((t * s.images + n) * s.channels + c) * s.height + h;
  to[gather ? row : i] = from[gather ? i : row];
}

void move_frames(bool gather, const Tensor& from, Tensor& to) {
  const FramesShape shape = shape_of(gather ? from : to);
  by_element_size(from, [&]<class W>(W) {
    launch_each(elements(from), frames_kernel<W>, gather, from.as<W>(), to.as<W>(), shape);
  });
}
void gather(const Tensor& x, Tensor& rows) {
  move_frames(true, x, rows);
}
void scatter(const Tensor& rows, Tensor& x) {
  move_frames(false, rows, x);
}

// to = from with zeros in the frames t >= frames[n] of sequence n; in order T, N, C (`rows`) or N, H, T, C.
template <class W>
__global__ void __launch_bounds__(kThreads)
    mask_kernel(bool rows, const W* from, const std::int32_t* frames, W* to, FramesShape s) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= s.size()) return;
  const std::int64_t group = i / s.channels;  // of the channels of a frame
  const std::int64_t t = rows ? group / s.images : group % s.frames;
  const std::int64_t n = rows ? group % s.images : group / s.frames / s.height;
  to[i] = t < frames[n] ? from[i] : W{0};
}

void mask(const Tensor& x, std::span<const std::int32_t> frames, Tensor& y) {
  const auto sequences = static_cast<std::int64_t>(frames.size());
  const bool rows = x.shape().rank() == 2;  // F channels of height 1
  const FramesShape shape = rows ? FramesShape{sequences, x.dim(1), 1, x.dim(0) / sequences} : shape_of(x);
  by_element_size(x, [&]<class W>(W) {
    launch_each(elements(x), mask_kernel<W>, rows, x.as<W>(), frames.data(), y.as<W>(), shape);
  });
}

const bool frames_registered = add_cuda_kernels<FramesKernels>({.gather = gather, .scatter = scatter});
const bool mask_registered = add_cuda_kernels<MaskFramesKernels>({.mask = mask});

}  // namespace
}  // namespace topknot::cuda
