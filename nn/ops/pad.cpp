#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable pad_end(const Variable& x, std::int64_t rows, std::int64_t columns, float value) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && rows >= 0 && columns >= 0,
                "pad_end: input must be [N, C, H, W], not " + in.str());
  if (rows == 0 && columns == 0) return x;
  const auto& kernels = kernels_for<PadKernels>(x);
  Tensor y = Tensor::empty({in[0], in[1], in[2] + rows, in[3] + columns}, x.value().layout(),
                           x.value().device(), x.value().dtype());
  kernels.forward(x.value(), value, y);
  return op_on("pad_end", x, y, [&kernels](const Tensor& grad, Tensor& dx) { kernels.backward(grad, dx); });
}

namespace {

// Calls fn(s, l, run) for each row of each channel or block of channels: `run` floats at s in the small
// images and at l in the large ones, and fn(s, l, 0) for each further row of the large ones.
void for_each_padded_row(const Tensor& small, const Tensor& large, auto&& fn) {
  const ChannelGeometry g(small);
  const std::int64_t short_row = small.dim(3) * g.block, long_row = large.dim(3) * g.block;
  parallel_each(g.images * g.channels / g.block, [&](std::int64_t c) {
    for (std::int64_t i = 0; i < large.dim(2); ++i)
      fn((c * small.dim(2) + i) * short_row, (c * large.dim(2) + i) * long_row,
         i < small.dim(2) ? short_row : 0);
  });
}

void pad_forward(const Tensor& x, float value, Tensor& y) {
  const std::int64_t row = y.dim(3) * ChannelGeometry(y).block;
  by_type(x.dtype(), [&]<class T>(T) {
    T padding;
    narrow(value, padding);
    for_each_padded_row(x, y, [&](std::int64_t s, std::int64_t l, std::int64_t run) {
      std::copy_n(x.as<T>() + s, run, y.as<T>() + l);
      std::fill_n(y.as<T>() + l + run, row - run, padding);
    });
  });
}
void pad_backward(const Tensor& dy, Tensor& dx) {
  by_type(dx.dtype(), [&]<class T>(T) {
    for_each_padded_row(dx, dy, [&](std::int64_t s, std::int64_t l, std::int64_t run) {
      std::copy_n(dy.as<T>() + l, run, dx.as<T>() + s);
    });
  });
}

const bool pad_registered = add_cpu_kernels<PadKernels>({.forward = pad_forward, .backward = pad_backward});

}  // namespace
}  // namespace topknot
