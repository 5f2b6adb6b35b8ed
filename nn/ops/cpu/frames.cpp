#include "nn/ops/frames.h"

#include <cstring>

#include "nn/ops/cpu/channels.h"

namespace topknot {
namespace {

// Calls fn(element of x in memory, element of rows) for each element; images are shared out over the threads.
template <class Fn>
void each_frame_element(const Tensor& x, const Fn& fn) {
  const ChannelGeometry g(x);
  const std::int64_t height = x.dim(2), frames = x.dim(3), features = x.dim(1) * height;
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n)
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

// Frames [0, kept) of a run of `count`, each of `bytes`; zeros behind them.
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

const RegisterKernels<MaskFramesKernels> mask_registered(DeviceKind::cpu, {.mask = mask});
const RegisterKernels<FramesKernels> frames_registered(DeviceKind::cpu,
                                                       {.gather = frames_gather, .scatter = frames_scatter});

}  // namespace
}  // namespace topknot
