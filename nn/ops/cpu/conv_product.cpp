#include "nn/ops/cpu/conv.h"

#include <algorithm>
#include <vector>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/gemm.h"

namespace topknot {

bool PointwiseConv::serves(const Tensor& x) const {
  return g_.kernel == 1 && g_.stride == 1 && g_.padding == 0 && g_.groups == 1 &&
         x.layout() == Layout::plain && x.dtype() == DType::f32 && x.dim(0) >= team_size() &&
         g_.out % channel_block() != 0;
}

void PointwiseConv::forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const {
  const std::int64_t pixels = x.dim(2) * x.dim(3), in = g_.in * pixels, out = g_.out * pixels;
  const ProductForm one{.m = g_.out, .n = pixels, .k = g_.in, .type = DType::f32};
  parallel_each(x.dim(0), [&](std::int64_t n) {
    sgemm(one, weight, x.data() + n * in, y.data() + n * out);
    if (after) after(n, n + 1);
  });
}

void PointwiseConv::backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                             GradientTarget weight_gradient, InputGradient& input_gradient) const {
  const std::int64_t pixels = x.dim(2) * x.dim(3), in = g_.in * pixels, out = g_.out * pixels;
  const ProductForm of_input{.m = g_.in,
                             .n = pixels,
                             .k = g_.out,
                             .type = DType::f32,
                             .a_transposed = true,
                             .add = input_gradient.accumulate};
  const ProductForm of_weight{
      .m = g_.out, .n = g_.in, .k = pixels, .type = DType::f32, .b_transposed = true, .add = true};
  const Tensor plain_grad = grad.defined() ? to_layout(grad, Layout::plain) : grad;
  std::vector<Tensor> sums(static_cast<std::size_t>(team_size()));  // of the weight's gradient, by thread
  parallel_ranges(x.dim(0), [&](int thread, std::int64_t begin, std::int64_t end) {
    Tensor filled, &sum = sums[static_cast<std::size_t>(thread)];
    if (!grad.defined()) filled = Tensor::empty({out});
    if (weight_gradient.data) sum = Tensor::zeros({g_.out * g_.in});
    for (std::int64_t n = begin; n < end; ++n) {
      if (filled.defined()) fill(n, n + 1, filled.data());
      const float* dy = filled.defined() ? filled.data() : plain_grad.data() + n * out;
      if (sum.defined()) sgemm(of_weight, dy, x.data() + n * in, sum.data());
      if (input_gradient.tensor.defined()) sgemm(of_input, weight, dy, input_gradient.tensor.data() + n * in);
    }
  });
  if (!weight_gradient.data) return;
  for (std::size_t t = 1; t < sums.size(); ++t)
    if (sums[t].defined())
      for (std::int64_t i = 0; i < sums[0].numel(); ++i) sums[0].data()[i] += sums[t].data()[i];
  write_gradient(weight_gradient, sums[0]);
}

namespace {

// Output pixels of the batch up to which the products are faster, and the least size of in * out.
constexpr std::int64_t kMostPixels = 256, kMostPixelsBfloat16 = 1024, kLeastWeights = 128 * 128;

struct Sizes {
  Sizes(const ConvGeometry& g, const Shape& x) : in(x), out(g.output_shape(x)) {}
  Shape in, out;
  std::int64_t in_pixels() const { return in[2] * in[3]; }
  std::int64_t out_pixels() const { return out[2] * out[3]; }
  std::int64_t rows() const { return out[0] * out_pixels(); }
};

// The offset of the block of channels that begins at c, for one pixel of an image.
std::int64_t place(const Shape& s, std::int64_t image, std::int64_t c, std::int64_t pixel) {
  return (image * s[1] + c) * s[2] * s[3] + pixel * channel_block();
}

// Calls fn(tap, pixel of the input) for the taps of an output pixel that lie inside the image.
void for_each_tap(const ConvGeometry& g, const Sizes& s, std::int64_t output_pixel, const auto& fn) {
  const std::int64_t row = output_pixel / s.out[3] * g.stride.height - g.padding.height,
                     column = output_pixel % s.out[3] * g.stride.width - g.padding.width;
  for (std::int64_t i = 0; i < g.kernel.height; ++i)
    for (std::int64_t j = 0; j < g.kernel.width; ++j)
      if (row + i >= 0 && row + i < s.in[2] && column + j >= 0 && column + j < s.in[3])
        fn(i * g.kernel.width + j, (row + i) * s.in[3] + column + j);
}

// X, of blocked activations.
template <class From, class To>
void columns_of(const ConvGeometry& g, const Sizes& s, const From* x, To* columns) {
  const std::int64_t taps = g.kernel.height * g.kernel.width, depth = g.in * taps, block = channel_block();
  parallel_each(s.rows(), [&](std::int64_t r) {
    To* row = columns + r * depth;
    std::fill_n(row, depth, To());
    for_each_tap(g, s, r % s.out_pixels(), [&](std::int64_t tap, std::int64_t pixel) {
      for (std::int64_t c = 0; c < g.in; c += block) {
        const From* from = x + place(s.in, r / s.out_pixels(), c, pixel);
        for (std::int64_t k = 0; k < block; ++k) narrow(widened(from[k]), row[(c + k) * taps + tap]);
      }
    });
  });
}

// dx (+)= what the columns' gradient holds for each input.
template <class T>
void add_columns(const ConvGeometry& g, const Sizes& s, const float* columns, T* dx, bool accumulate) {
  const std::int64_t taps = g.kernel.height * g.kernel.width, depth = g.in * taps, block = channel_block(),
                     image_size = g.in * s.in_pixels();
  parallel_ranges(s.in[0], [&](int, std::int64_t begin, std::int64_t end) {
    std::vector<float> sums(static_cast<std::size_t>(image_size));
    for (std::int64_t n = begin; n < end; ++n) {
      T* to = dx + n * image_size;
      for (std::int64_t i = 0; i < image_size; ++i)
        sums[static_cast<std::size_t>(i)] = accumulate ? widened(to[i]) : 0.0f;
      for (std::int64_t p = 0; p < s.out_pixels(); ++p)
        for_each_tap(g, s, p, [&](std::int64_t tap, std::int64_t pixel) {
          const float* row = columns + (n * s.out_pixels() + p) * depth + tap;
          for (std::int64_t c = 0; c < g.in; c += block) {
            float* sum = sums.data() + place(s.in, 0, c, pixel);
            for (std::int64_t k = 0; k < block; ++k) sum[k] += row[(c + k) * taps];
          }
        });
      for (std::int64_t i = 0; i < image_size; ++i) narrow(sums[static_cast<std::size_t>(i)], to[i]);
    }
  });
}

// Between Y and blocked activations.
void for_each_block(const Sizes& s, const auto& fn) {
  const std::int64_t channels = s.out[1];
  parallel_each(s.rows(), [&](std::int64_t r) {
    for (std::int64_t c = 0; c < channels; c += channel_block())
      fn(r * channels + c, place(s.out, r / s.out_pixels(), c, r % s.out_pixels()));
  });
}
template <class From, class To>
void copy_block(const From* from, To* to) {
  for (int k = 0; k < channel_block(); ++k) narrow(widened(from[k]), to[k]);
}

// The products' type: few rows are in f32, which needs no rounded weights.
DType product_type(DType type, const Sizes& s) {
  return s.rows() <= kFewRows ? DType::f32 : type;
}

Tensor columns(const ConvGeometry& g, const Sizes& s, const Tensor& x, DType type) {
  Tensor result = Tensor::empty({s.rows(), g.weight_shape().numel() / g.out}, Layout::plain, {}, type);
  by_type(x.dtype(), [&](auto from) {
    by_type(type, [&](auto to) { columns_of(g, s, x.as<decltype(from)>(), result.as<decltype(to)>()); });
  });
  return result;
}

}  // namespace

bool ProductConv::serves(const Tensor& x) const {
  if (g_.groups != 1 || x.layout() != Layout::blocked || g_.out % channel_block() != 0 ||
      g_.in * g_.out < kLeastWeights)
    return false;
  const Shape y = g_.output_shape(x.shape());
  return y[0] * y[2] * y[3] <= (x.dtype() == DType::bf16 ? kMostPixelsBfloat16 : kMostPixels);
}

void ProductConv::forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const {
  const Sizes s(g_, x.shape());
  const DType type = product_type(x.dtype(), s);
  const Tensor x_columns = columns(g_, s, x, type);
  Tensor rows = Tensor::empty({s.rows(), g_.out}, Layout::plain, {}, type);
  matmul({.m = s.rows(),
          .n = g_.out,
          .k = x_columns.dim(1),
          .type = type,
          .b_type = DType::f32,
          .c_type = type,
          .b_transposed = true},
         x_columns.data(), weight, rows.data());
  by_type(type, [&](auto from) {
    by_type(y.dtype(), [&](auto to) {
      for_each_block(s, [&](std::int64_t row, std::int64_t at) {
        copy_block(rows.as<decltype(from)>() + row, y.as<decltype(to)>() + at);
      });
    });
  });
  if (after) parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) { after(begin, end); });
}

void ProductConv::backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                           GradientTarget weight_gradient, InputGradient& input_gradient) const {
  const Sizes s(g_, x.shape());
  const DType type = product_type(x.dtype(), s);
  Tensor dy = grad;
  if (!dy.defined()) {
    dy = Tensor::empty(s.out, Layout::blocked, {}, x.dtype());
    const auto image = static_cast<std::int64_t>(size_of(x.dtype())) * g_.out * s.out_pixels();
    parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
      fill(begin, end, dy.as<std::byte>() + begin * image);
    });
  }
  Tensor rows = Tensor::empty({s.rows(), g_.out}, Layout::plain, {}, type);
  by_type(dy.dtype(), [&](auto from) {
    by_type(type, [&](auto to) {
      for_each_block(s, [&](std::int64_t row, std::int64_t at) {
        copy_block(dy.as<decltype(from)>() + at, rows.as<decltype(to)>() + row);
      });
    });
  });
  const std::int64_t depth = g_.weight_shape().numel() / g_.out;
  if (weight_gradient.data)
    matmul({.m = g_.out,
            .n = depth,
            .k = s.rows(),
            .type = type,
            .a_transposed = true,
            .add = weight_gradient.accumulate},
           rows.data(), columns(g_, s, x, type).data(), weight_gradient.data);
  if (!input_gradient.tensor.defined()) return;
  Tensor dcolumns = Tensor::empty({s.rows(), depth});
  matmul({.m = s.rows(), .n = depth, .k = g_.out, .type = type, .b_type = DType::f32}, rows.data(), weight,
         dcolumns.data());
  by_type(x.dtype(), [&](auto to) {
    add_columns(g_, s, dcolumns.data(), input_gradient.tensor.as<decltype(to)>(), input_gradient.accumulate);
  });
}

}  // namespace topknot
