#include "nn/ops/concat.h"

#include "nn/ops/cpu/channels.h"

namespace topknot {
namespace {

Layout channel_copy_layout(const Tensor& x, const ChannelRun& run, std::int64_t other_channels) {
  const int block = channel_block();
  const bool whole_blocks = run.from_step == 1 && run.to_step == 1 && run.from % block == 0 &&
                            run.to % block == 0 && run.count % block == 0 && other_channels % block == 0;
  return whole_blocks ? x.layout() : Layout::plain;
}

// Channels that follow each other lie in one piece of an image, in either layout.
template <class T>
void copy_stored(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  const ChannelGeometry from(x), to(y);
  const bool one_piece = run.from_step == 1 && run.to_step == 1;
  const std::int64_t pieces = one_piece ? 1 : run.count, elements = (one_piece ? run.count : 1) * from.pixels;
  parallel_ranges(from.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n)
      for (std::int64_t i = 0; i < pieces; ++i) {
        const T* in = from.image<T>(x, n) + (run.from + i * run.from_step) * from.pixels;
        T* out = to.image<T>(y, n) + (run.to + i * run.to_step) * to.pixels;
        if (!accumulate)
          std::copy(in, in + elements, out);
        else
          for (std::int64_t k = 0; k < elements; ++k) narrow(widened(out[k]) + widened(in[k]), out[k]);
      }
  });
}

void copy_channels(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  by_type(x.dtype(), [&](auto type) { copy_stored<decltype(type)>(x, y, run, accumulate); });
}

const RegisterKernels<ChannelCopyKernels> concat_registered(DeviceKind::cpu, {.layout = channel_copy_layout,
                                                                              .copy = copy_channels});

}  // namespace
}  // namespace topknot
