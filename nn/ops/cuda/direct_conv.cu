#include "nn/ops/cuda/direct_conv.h"

#include <algorithm>

#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/cuda/products.h"

namespace topknot::cuda {
namespace {

// Threads of the weight's gradient, about: below, the rows of all images are split into slabs.
constexpr std::size_t kWeightThreads = std::size_t{1} << 18;

struct DirectShape {
  int height, width, in;           // of x
  int out_height, out_width, out;  // of y
  int in_of_group, out_of_group;   // channels
  int kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width;
};

DirectShape shape_of(const ConvGeometry& g, const Tensor& x, const Tensor& y) {
  check_counted_nhwc("conv2d", x), check_counted_nhwc("conv2d", y);
  const auto size = [](std::int64_t value) { return static_cast<int>(value); };
  return {size(x.dim(2)),         size(x.dim(3)),         size(g.in),
          size(y.dim(2)),         size(y.dim(3)),         size(g.out),
          size(g.in / g.groups),  size(g.out / g.groups), size(g.kernel.height),
          size(g.kernel.width),   size(g.stride.height),  size(g.stride.width),
          size(g.padding.height), size(g.padding.width)};
}

// Element `at` of an nhwc activation.
struct Place {
  __device__ Place(std::uint32_t at, int height, int width, int channels)
      : channel(static_cast<int>(at % channels)),
        column(static_cast<int>(at / channels % width)),
        row(static_cast<int>(at / channels / width % height)),
        image(at / channels / width / height) {}
  int channel, column, row;
  std::uint32_t image;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    direct_forward_kernel(const T* x, const T* filter, T* y, DirectShape s, std::uint32_t n) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const Place to(static_cast<std::uint32_t>(at), s.out_height, s.out_width, s.out);
  const std::size_t next_channel = std::size_t{1} * s.kernel_height * s.kernel_width * s.out;
  const T* image =
      x + std::size_t{to.image} * s.height * s.width * s.in + to.channel / s.out_of_group * s.in_of_group;
  float sum = 0;
  for (int p = 0; p < s.kernel_height; ++p)
    for (int q = 0; q < s.kernel_width; ++q) {
      const int row = to.row * s.stride_height + p - s.padding_height,
                column = to.column * s.stride_width + q - s.padding_width;
      if (row < 0 || row >= s.height || column < 0 || column >= s.width) continue;
      const T* from = image + (std::size_t{1} * row * s.width + column) * s.in;
      const T* weight = filter + (std::size_t{1} * p * s.kernel_width + q) * s.out + to.channel;
      for (int c = 0; c < s.in_of_group; ++c, weight += next_channel)
        sum += as_float(from[c]) * as_float(*weight);
    }
  y[at] = from_float<T>(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    direct_input_gradient_kernel(const T* filter, const T* dy, T* dx, bool accumulate, DirectShape s,
                                 std::uint32_t n) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const Place to(static_cast<std::uint32_t>(at), s.height, s.width, s.in);
  const int first = to.channel / s.in_of_group * s.out_of_group, c = to.channel % s.in_of_group;
  float sum = 0;
  for (int p = 0; p < s.kernel_height; ++p)
    for (int q = 0; q < s.kernel_width; ++q) {
      const int down = to.row + s.padding_height - p, across = to.column + s.padding_width - q;
      if (down < 0 || down % s.stride_height != 0 || across < 0 || across % s.stride_width != 0) continue;
      const int row = down / s.stride_height, column = across / s.stride_width;
      if (row >= s.out_height || column >= s.out_width) continue;
      const T* from =
          dy + ((std::size_t{to.image} * s.out_height + row) * s.out_width + column) * s.out + first;
      const T* weight =
          filter + ((std::size_t{1} * c * s.kernel_height + p) * s.kernel_width + q) * s.out + first;
      for (int k = 0; k < s.out_of_group; ++k) sum += as_float(from[k]) * as_float(weight[k]);
    }
  dx[at] = from_float<T>(accumulate ? as_float(dx[at]) + sum : sum);
}

// A thread sums one element of the filter over a slab of y's rows of all images; sums is [slabs, filter].
template <class T>
__global__ void __launch_bounds__(kThreads)
    direct_weight_gradient_kernel(const T* x, const T* dy, float* sums, DirectShape s, std::size_t rows,
                                  std::size_t rows_of_slab, std::size_t filter, std::size_t n) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const Place of(static_cast<std::uint32_t>(at % filter), s.kernel_height, s.kernel_width, s.out);
  const int channel = of.channel / s.out_of_group * s.in_of_group + static_cast<int>(of.image);
  const std::size_t begin = at / filter * rows_of_slab;
  const std::size_t end = begin + rows_of_slab < rows ? begin + rows_of_slab : rows;
  float sum = 0;
  for (std::size_t i = begin; i < end; ++i) {
    const int row = static_cast<int>(i % s.out_height) * s.stride_height + of.row - s.padding_height;
    if (row < 0 || row >= s.height) continue;
    const T* from = x + (i / s.out_height * s.height + row) * s.width * s.in + channel;
    const T* by = dy + i * s.out_width * s.out + of.channel;
    for (int j = 0; j < s.out_width; ++j) {
      const int column = j * s.stride_width + of.column - s.padding_width;
      if (column < 0 || column >= s.width) continue;
      sum += as_float(by[std::size_t{1} * j * s.out]) * as_float(from[std::size_t{1} * column * s.in]);
    }
  }
  sums[at] = sum;
}

// The filter as a matrix of the output's channels to be transposed.
FilterShape matrix(const ConvGeometry& g) {
  return {1, g.out, g.in / g.groups * g.kernel.height * g.kernel.width};
}

}  // namespace

Tensor direct_conv_filter(const ConvGeometry& geometry, const Tensor& weight, DType type) {
  return filter_of(weight, type, matrix(geometry));
}

void direct_conv(const ConvGeometry& geometry, const Tensor& x, const Tensor& filter, Tensor& y) {
  const DirectShape shape = shape_of(geometry, x, y);
  by_type(x, [&]<class T>(T) {
    launch_each(elements(y), direct_forward_kernel<T>, x.as<T>(), filter.as<T>(), y.as<T>(), shape,
                word(y.numel()));
  });
}

void direct_conv_input_gradient(const ConvGeometry& geometry, const Tensor& filter, const Tensor& dy,
                                InputGradient& dx) {
  const DirectShape shape = shape_of(geometry, dx.tensor, dy);
  by_type(dy, [&]<class T>(T) {
    launch_each(elements(dx.tensor), direct_input_gradient_kernel<T>, filter.as<T>(), dy.as<T>(),
                dx.tensor.as<T>(), dx.accumulate, shape, word(dx.tensor.numel()));
  });
}

void direct_conv_weight_gradient(const ConvGeometry& geometry, const Tensor& x, const Tensor& dy,
                                 const GradientTarget& dw) {
  const DirectShape shape = shape_of(geometry, x, dy);
  const std::size_t filter = matrix(geometry).size(), rows = static_cast<std::size_t>(dy.dim(0) * dy.dim(2)),
                    rows_of_slab = ceil_div(rows, std::max(kWeightThreads / filter, std::size_t{1})),
                    slabs = ceil_div(rows, rows_of_slab);
  const DeviceArray<float> sums(slabs * filter), sum(filter), scratch(column_sums_scratch(slabs, filter));
  by_type(x, [&]<class T>(T) {
    launch_each(sums.size(), direct_weight_gradient_kernel<T>, x.as<T>(), dy.as<T>(), sums.data(), shape,
                rows, rows_of_slab, filter, sums.size());
  });
  column_sums(compute_stream(), sums.data(), false, slabs, filter, scratch.data(), sum.data(), false);
  weight_from_filter(compute_stream(), sum.data(), false, dw.data, dw.accumulate, matrix(geometry));
}

}  // namespace topknot::cuda
