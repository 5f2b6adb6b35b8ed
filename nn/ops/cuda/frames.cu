#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/frames_kernels.h"

namespace topknot::cuda {
namespace {

// A thread per element of x; neighbours are neighbours there.
template <class W>
__global__ void __launch_bounds__(kThreads) frames_kernel(bool gather, const W* from, W* to, FramesShape s) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.images * s.channels * s.height * s.frames) return;
  const std::int64_t c = i % s.channels, t = i / s.channels % s.frames,
                     h = i / s.channels / s.frames % s.height, n = i / s.channels / s.frames / s.height;
  const std::int64_t row = ((t * s.images + n) * s.channels + c) * s.height + h;
  to[gather ? row : i] = from[gather ? i : row];
}

template <class W>
void frames_of(cudaStream_t stream, bool gather, const void* from, void* to, const FramesShape& s) {
  const std::size_t n = static_cast<std::size_t>(s.images * s.channels * s.height * s.frames);
  launch(frames_kernel<W>, grid_for(n, kThreads), kThreads, stream, gather, static_cast<const W*>(from),
         static_cast<W*>(to), s);
}

// A thread per element.
template <class W>
__global__ void __launch_bounds__(kThreads)
    mask_kernel(bool rows, const W* from, const std::int32_t* frames, W* to, FramesShape s) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.images * s.channels * s.height * s.frames) return;
  const std::int64_t group = i / s.channels;  // of the channels of a frame
  const std::int64_t t = rows ? group / s.images : group % s.frames;
  const std::int64_t n = rows ? group % s.images : group / s.frames / s.height;
  to[i] = t < frames[n] ? from[i] : W{0};
}

template <class W>
void mask_of(cudaStream_t stream, bool rows, const void* from, const std::int32_t* frames, void* to,
             const FramesShape& s) {
  const std::size_t n = static_cast<std::size_t>(s.images * s.channels * s.height * s.frames);
  launch(mask_kernel<W>, grid_for(n, kThreads), kThreads, stream, rows, static_cast<const W*>(from), frames,
         static_cast<W*>(to), s);
}

}  // namespace

void move_frames(cudaStream_t stream, bool gather, const void* from, void* to, const FramesShape& s,
                 std::size_t element) {
  (element == 2 ? frames_of<std::uint16_t> : frames_of<std::uint32_t>)(stream, gather, from, to, s);
}

void mask_frames(cudaStream_t stream, bool rows, const void* from, const std::int32_t* frames, void* to,
                 const FramesShape& s, std::size_t element) {
  (element == 2 ? mask_of<std::uint16_t> : mask_of<std::uint32_t>)(stream, rows, from, frames, to, s);
}

}  // namespace topknot::cuda
