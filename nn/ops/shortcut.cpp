#include "nn/ops/shortcut.h"

#include "nn/core/base/check.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {
namespace {

// Calls fn(narrow, wide, run): `run` channels side by side of one pixel of the narrow and of the wide image.
template <class Fn>
void for_each_run(const ChannelGeometry& narrow, const Shape& in, const ChannelGeometry& wide,
                  const Shape& out, Fn&& fn) {
  const std::int64_t shift = (wide.channels - narrow.channels) / 2;
  const auto at = [](const ChannelGeometry& g, std::int64_t c, std::int64_t pixel) {
    return c / g.block * g.block * g.pixels + pixel * g.block + c % g.block;
  };
  // Runs stay inside a block of either image.
  const std::int64_t run = narrow.block == 1 ? 1
                                             : (shift % narrow.block == 0 ? narrow.block
                                                : shift % 8 == 0          ? 8
                                                                          : 1);
  for (std::int64_t c = 0; c < narrow.channels; c += run)
    for (std::int64_t i = 0; i < out[2]; ++i)
      for (std::int64_t j = 0; j < out[3]; ++j)
        fn(at(narrow, c, 2 * i * in[3] + 2 * j), at(wide, c + shift, i * out[3] + j), run);
}

}  // namespace

Variable subsample_and_pad(const Variable& x, std::int64_t channels) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && channels >= in[1], "subsample_and_pad: " + in.str() + " to fewer channels");
  if (on_gpu(x)) return cuda::subsample_and_pad(x, channels);
  const Shape out{in[0], channels, (in[2] + 1) / 2, (in[3] + 1) / 2};
  Tensor y = Tensor::zeros(out, x.value().layout());
  const ChannelGeometry narrow(x.value()), wide(y);
  parallel_ranges(in[0], [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float* from = x.value().data() + n * narrow.image_floats();
      float* to = y.data() + n * wide.image_floats();
      for_each_run(narrow, in, wide, out, [=](std::int64_t a, std::int64_t b, std::int64_t run) {
        for (std::int64_t k = 0; k < run; ++k) to[b + k] = from[a + k];
      });
    }
  });

  return {
      "subsample_and_pad", y, {x}, [=](Tensor grad) {  // the transpose: pixels that were left out get zero
        Tensor dx = Tensor::zeros(x.shape(), x.value().layout());
        parallel_ranges(x.shape()[0], [&](int, std::int64_t begin, std::int64_t end) {
          for (std::int64_t n = begin; n < end; ++n) {
            float* to = dx.data() + n * narrow.image_floats();
            const float* from = grad.data() + n * wide.image_floats();
            for_each_run(narrow, x.shape(), wide, out, [=](std::int64_t a, std::int64_t b, std::int64_t run) {
              for (std::int64_t k = 0; k < run; ++k) to[a + k] = from[b + k];
            });
          }
        });
        x.accumulate_grad(std::move(dx));
      }};
}

Variable flatten(const Variable& x) {
  if (on_gpu(x)) return cuda::flatten(x);
  const Shape shape = x.shape(), flat{shape[0], shape.numel() / shape[0]};
  const Layout layout = x.value().layout();
  return {"flatten", to_layout(x.value(), Layout::plain).reshaped(flat), {x}, [=](Tensor grad) {
            x.accumulate_grad(to_layout(grad.reshaped(shape), layout));
          }};
}

}  // namespace topknot
