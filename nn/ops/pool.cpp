// Pooling: on a CPU windows by oneDNN, and the mean of whole images here.
#include <map>
#include <tuple>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable pool(const Variable& x, const PoolGeometry& g) {
  TOPKNOT_CHECK(g.window > 0 && g.stride > 0 && g.padding >= 0 && g.padding < g.window,
                "pool: window and stride must be positive, the padding smaller than the window");
  const Tensor& in = x.value();
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4, "pool: input must be [N, C, H, W], not " + shape.str());
  TOPKNOT_CHECK(shape[2] + 2 * g.padding >= g.window && shape[3] + 2 * g.padding >= g.window,
                "pool: a window larger than " + shape.str());
  const auto& kernels = kernels_for<PoolKernels>(x);
  Tensor y = Tensor::empty({shape[0], shape[1], g.output_size(shape[2]), g.output_size(shape[3])},
                           in.layout(), in.device(), in.dtype());
  const OpState state = kernels.forward(g, in, y);
  return op_on("pool", x, y, [=, &kernels](const Tensor& grad, Tensor& dx) {
    kernels.backward(g, state, x.value(), y, grad, dx);
  });
}

Variable global_average_pool(const Variable& x) {
  const Tensor& in = x.value();
  TOPKNOT_CHECK(x.shape().rank() == 4,
                "global_average_pool: input must be [N, C, H, W], not " + x.shape().str());
  const auto& kernels = kernels_for<GlobalAveragePoolKernels>(x);
  Tensor y = Tensor::empty({in.dim(0), in.dim(1)}, Layout::plain, in.device(), in.dtype());
  kernels.forward(in, y);
  return op_on("global_average_pool", x, y,
               [&kernels](const Tensor& grad, Tensor& dx) { kernels.backward(grad, dx); });
}

namespace {

// The calling thread's, made once for each geometry, shape and number of compute threads.
std::shared_ptr<const DnnlPair> pool_primitives(const PoolGeometry& g, const Tensor& x, const Tensor& y) {
  using Key = std::tuple<PoolGeometry, std::array<std::int64_t, 4>, Layout, DType, int>;
  thread_local std::map<Key, std::shared_ptr<const DnnlPair>> made;
  auto& pair = made[{g, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, x.layout(), x.dtype(), team_size()}];
  if (pair) return pair;
  const auto algorithm =
      g.kind == PoolKind::max ? dnnl::algorithm::pooling_max : dnnl::algorithm::pooling_avg_exclude_padding;
  const auto src = activation_desc(x.shape(), x.layout(), x.dtype()),
             dst = activation_desc(y.shape(), x.layout(), x.dtype());
  const dnnl::memory::dims strides{g.stride, g.stride}, window{g.window, g.window};
  // oneDNN reads the right and bottom padding; what does not fill a window there is left out.
  const auto low = g.padding;
  const auto high = [&](std::int64_t size) {
    return (g.output_size(size) - 1) * g.stride + g.window - size - low;
  };
  const dnnl::memory::dims begin{low, low}, end{high(x.dim(2)), high(x.dim(3))};
  const auto attributes = user_scratchpad();
  const dnnl::pooling_forward::primitive_desc f(
      {dnnl::prop_kind::forward_training, algorithm, src, dst, strides, window, begin, end}, attributes,
      dnnl_cpu_engine());
  const dnnl::pooling_backward::primitive_desc b({algorithm, src, dst, strides, window, begin, end},
                                                 attributes, dnnl_cpu_engine(), f);
  return pair = std::make_shared<const DnnlPair>(
             f, DnnlKernel::Arguments{{DNNL_ARG_SRC, src}, {DNNL_ARG_DST, dst}}, b,
             DnnlKernel::Arguments{{DNNL_ARG_DIFF_DST, dst}, {DNNL_ARG_DIFF_SRC, src}});
}

// Max pooling keeps in the workspace where each maximum was.
OpState pool_forward(const PoolGeometry& g, const Tensor& x, Tensor& y) {
  return DnnlPair::forward(pool_primitives(g, x, y), {x.data(), y.data()});
}

void pool_backward(const PoolGeometry&, const OpState& state, const Tensor&, const Tensor&, const Tensor& dy,
                   Tensor& dx) {
  DnnlPair::backward(state, {dy.data(), dx.data()});
}

void average_forward(const Tensor& x, Tensor& y) {
  const ChannelGeometry g(x);
  const float scale = 1.0f / static_cast<float>(g.pixels);
  by_type(x.dtype(), [&]<class T>(T) {
    parallel_each(g.images, [&](std::int64_t n) {
      const T* in = g.image<T>(x, n);
      T* out = y.as<T>() + n * g.channels;
      for (std::int64_t c = 0; c < g.channels; c += g.block, out += g.block) {
        float sums[kWidestBlock] = {};
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) sums[k] += widened(*in++);
        for (int k = 0; k < g.block; ++k) narrow(sums[k] * scale, out[k]);
      }
    });
  });
}

void average_backward(const Tensor& dy, Tensor& dx) {
  const ChannelGeometry g(dx);
  const float scale = 1.0f / static_cast<float>(g.pixels);
  by_type(dx.dtype(), [&]<class T>(T) {
    parallel_each(g.images, [&](std::int64_t n) {
      T* out = g.image<T>(dx, n);
      const T* from = dy.as<T>() + n * g.channels;
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) narrow(widened(from[c + k]) * scale, *out++);
    });
  });
}

const bool pool_kernels = add_cpu_kernels<PoolKernels>({.forward = pool_forward, .backward = pool_backward});
const bool average_kernels =
    add_cpu_kernels<GlobalAveragePoolKernels>({.forward = average_forward, .backward = average_backward});

}  // namespace
}  // namespace topknot
