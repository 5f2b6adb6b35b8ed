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
void copy_channels(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  const ChannelGeometry from(x), to(y);
  const bool one_piece = run.from_step == 1 && run.to_step == 1;
  const std::int64_t pieces = one_piece ? 1 : run.count, floats = (one_piece ? run.count : 1) * from.pixels;
  parallel_ranges(from.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n)
      for (std::int64_t i = 0; i < pieces; ++i) {
        const float* in = x.data() + n * from.image_floats() + (run.from + i * run.from_step) * from.pixels;
        float* out = y.data() + n * to.image_floats() + (run.to + i * run.to_step) * to.pixels;
        if (!accumulate)
          std::copy(in, in + floats, out);
        else
          for (std::int64_t k = 0; k < floats; ++k) out[k] += in[k];
      }
  });
}

const RegisterKernels<ChannelCopyKernels> concat_registered(DeviceKind::cpu, {.layout = channel_copy_layout,
                                                                              .copy = copy_channels});

}  // namespace
}  // namespace topknot
