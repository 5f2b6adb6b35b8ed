#include "nn/core/base/check.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cuda_ops.h"
#include "nn/ops/pool.h"

namespace topknot {

Variable global_average_pool(const Variable& x) {
  TOPKNOT_CHECK(x.shape().rank() == 4,
                "global_average_pool: input must be [N, C, H, W], not " + x.shape().str());
  if (on_gpu(x)) return cuda::global_average_pool(x);
  const ChannelGeometry g(x.value());
  Tensor y = Tensor::empty({g.images, g.channels});
  const float scale = 1.0f / static_cast<float>(g.pixels);
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float* in = x.value().data() + n * g.image_floats();
      float* out = y.data() + n * g.channels;
      for (std::int64_t c = 0; c < g.channels; c += g.block, out += g.block) {
        std::fill(out, out + g.block, 0.0f);
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) out[k] += *in++;
        for (int k = 0; k < g.block; ++k) out[k] *= scale;
      }
    }
  });

  return {"global_average_pool", y, {x}, [=](Tensor grad) {  // dx = dy / (H W), everywhere
            Tensor dx = Tensor::empty(x.shape(), x.value().layout());
            parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
              for (std::int64_t n = begin; n < end; ++n) {
                float* out = dx.data() + n * g.image_floats();
                const float* dy = grad.data() + n * g.channels;
                for (std::int64_t c = 0; c < g.channels; c += g.block)
                  for (std::int64_t i = 0; i < g.pixels; ++i)
                    for (int k = 0; k < g.block; ++k) *out++ = dy[c + k] * scale;
              }
            });
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
