#include "nn/ops/frames.h"

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

const RegisterKernels<FramesKernels> frames_registered(DeviceKind::cpu,
                                                       {.gather = frames_gather, .scatter = frames_scatter});

}  // namespace
}  // namespace topknot
