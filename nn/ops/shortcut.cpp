#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable subsample_and_pad(const Variable& x, std::int64_t channels) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && channels >= in[1], "subsample_and_pad: " + in.str() + " to fewer channels");
  const auto& kernels = kernels_for<ShortcutKernels>(x);
  Tensor y = Tensor::empty({in[0], channels, (in[2] + 1) / 2, (in[3] + 1) / 2}, x.value().layout(),
                           x.value().device(), x.value().dtype());
  kernels.forward(x.value(), y);
  return op_on("subsample_and_pad", x, y,
               [&kernels](const Tensor& grad, Tensor& dx) { kernels.backward(grad, dx); });
}

namespace {

// Calls fn(n, w, run) for each place that both hold, `run` channels side by side: at n floats in the large
// images of few channels, at w floats in the small images of many. The images are worked through in parallel.
void for_each_run(const Tensor& large, const Tensor& small, auto&& fn) {
  const ChannelGeometry narrow(large), wide(small);
  const std::int64_t shift = (wide.channels - narrow.channels) / 2;
  const auto at = [](const ChannelGeometry& g, std::int64_t c, std::int64_t pixel) {
    return c / g.block * g.block * g.pixels + pixel * g.block + c % g.block;
  };
  // Runs stay inside a block of either image.
  const std::int64_t run = narrow.block == 1 ? 1
                                             : (shift % narrow.block == 0 ? narrow.block
                                                : shift % 8 == 0          ? 8
                                                                          : 1);
  parallel_each(narrow.images, [&](std::int64_t n) {
    for (std::int64_t c = 0; c < narrow.channels; c += run)
      for (std::int64_t i = 0; i < small.dim(2); ++i)
        for (std::int64_t j = 0; j < small.dim(3); ++j)
          fn(n * narrow.image_elements() + at(narrow, c, 2 * i * large.dim(3) + 2 * j),
             n * wide.image_elements() + at(wide, c + shift, i * small.dim(3) + j), run);
  });
}

template <class T>
void copy_run(const T* from, T* to, std::int64_t run) {
  for (std::int64_t k = 0; k < run; ++k) to[k] = from[k];
}

void fill_zero(Tensor& t) {
  cpu_backend().fill_zero(t.data(), (t.bytes() + 3) / 4);
}

void forward(const Tensor& x, Tensor& y) {
  fill_zero(y);
  by_type(x.dtype(), [&]<class T>(T) {
    for_each_run(x, y, [from = x.as<T>(), to = y.as<T>()](std::int64_t n, std::int64_t w, std::int64_t run) {
      copy_run(from + n, to + w, run);
    });
  });
}

void backward(const Tensor& dy, Tensor& dx) {
  fill_zero(dx);
  by_type(dx.dtype(), [&]<class T>(T) {
    for_each_run(dx, dy,
                 [from = dy.as<T>(), to = dx.as<T>()](std::int64_t n, std::int64_t w, std::int64_t run) {
                   copy_run(from + w, to + n, run);
                 });
  });
}

const bool shortcut_registered = add_cpu_kernels<ShortcutKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
