// Pooling by oneDNN, and the mean of whole images.
#include <map>
#include <tuple>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

struct PoolPlan {
  std::unique_ptr<DnnlKernel> forward, backward;
  std::int64_t workspace_floats = 0;
};

std::shared_ptr<const PoolPlan> make_plan(const PoolGeometry& g, const Shape& x, const Shape& y,
                                          Layout layout, DType type) {
  auto result = std::make_shared<PoolPlan>();
  const auto algorithm =
      g.kind == PoolKind::max ? dnnl::algorithm::pooling_max : dnnl::algorithm::pooling_avg_exclude_padding;
  const auto src = activation_desc(x, layout, type), dst = activation_desc(y, layout, type);
  const dnnl::memory::dims strides{g.stride, g.stride}, window{g.window, g.window};
  // oneDNN reads the right and bottom padding; what does not fill a window there is left out.
  const auto low = g.padding;
  const auto high = [&](std::int64_t size) {
    return (g.output_size(size) - 1) * g.stride + g.window - size - low;
  };
  const dnnl::memory::dims begin{low, low}, end{high(x[2]), high(x[3])};
  const auto attributes = user_scratchpad();
  const dnnl::pooling_forward::primitive_desc f(
      {dnnl::prop_kind::forward_training, algorithm, src, dst, strides, window, begin, end}, attributes,
      dnnl_cpu_engine());
  const dnnl::pooling_backward::primitive_desc b({algorithm, src, dst, strides, window, begin, end},
                                                 attributes, dnnl_cpu_engine(), f);
  DnnlKernel::Arguments forward{{DNNL_ARG_SRC, src}, {DNNL_ARG_DST, dst}};
  DnnlKernel::Arguments backward{{DNNL_ARG_DIFF_DST, dst}, {DNNL_ARG_DIFF_SRC, src}};
  if (g.kind == PoolKind::max) {
    forward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
    backward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
    result->workspace_floats = static_cast<std::int64_t>(f.workspace_desc().get_size() / sizeof(float) + 1);
  }
  result->forward = std::make_unique<DnnlKernel>(dnnl::pooling_forward(f), forward, f.scratchpad_desc(), 1);
  result->backward =
      std::make_unique<DnnlKernel>(dnnl::pooling_backward(b), backward, b.scratchpad_desc(), 1);
  return result;
}

// The calling thread's, made once for each geometry, shape and number of compute threads: a primitive keeps that number.
std::shared_ptr<const PoolPlan> plan_for(const PoolGeometry& g, const Tensor& x, const Tensor& y) {
  using Key = std::tuple<PoolGeometry, std::array<std::int64_t, 4>, Layout, DType, int>;
  thread_local std::map<Key, std::shared_ptr<const PoolPlan>> plans;
  auto& plan = plans[{g, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, x.layout(), x.dtype(), team_size()}];
  if (!plan) plan = make_plan(g, x.shape(), y.shape(), x.layout(), x.dtype());
  return plan;
}

struct PoolKept {
  std::shared_ptr<const PoolPlan> plan;
  Tensor workspace;  // of max pooling: where each maximum was
};

OpState pool_forward(const PoolGeometry& g, const Tensor& x, Tensor& y) {
  const auto plan = plan_for(g, x, y);
  Tensor workspace = plan->workspace_floats ? Tensor::empty({plan->workspace_floats}) : Tensor();
  if (workspace.defined())
    plan->forward->run(0, {x.data(), y.data(), workspace.data()});
  else
    plan->forward->run(0, {x.data(), y.data()});
  return std::make_shared<PoolKept>(PoolKept{plan, std::move(workspace)});
}

void pool_backward(const PoolGeometry&, const OpState& state, const Tensor&, const Tensor&, const Tensor& dy,
                   Tensor& dx) {
  const auto& kept = state_as<PoolKept>(state);
  if (kept.workspace.defined())
    kept.plan->backward->run(0, {dy.data(), dx.data(), kept.workspace.data()});
  else
    kept.plan->backward->run(0, {dy.data(), dx.data()});
}

void average_forward(const Tensor& x, Tensor& y) {
  const ChannelGeometry g(x);
  const float scale = 1.0f / static_cast<float>(g.pixels);
  by_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const T* in = g.image<T>(x, n);
        T* out = y.as<T>() + n * g.channels;
        for (std::int64_t c = 0; c < g.channels; c += g.block, out += g.block) {
          float sums[kWidestBlock] = {};
          for (std::int64_t i = 0; i < g.pixels; ++i)
            for (int k = 0; k < g.block; ++k) sums[k] += widened(*in++);
          for (int k = 0; k < g.block; ++k) narrow(sums[k] * scale, out[k]);
        }
      }
    });
  });
}

void average_backward(const Tensor& dy, Tensor& dx) {
  const ChannelGeometry g(dx);
  const float scale = 1.0f / static_cast<float>(g.pixels);
  by_type(dx.dtype(), [&](auto type) {
    using T = decltype(type);
    parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        T* out = g.image<T>(dx, n);
        const T* from = dy.as<T>() + n * g.channels;
        for (std::int64_t c = 0; c < g.channels; c += g.block)
          for (std::int64_t i = 0; i < g.pixels; ++i)
            for (int k = 0; k < g.block; ++k) narrow(widened(from[c + k]) * scale, *out++);
      }
    });
  });
}

const RegisterKernels<PoolKernels> pool_kernels(DeviceKind::cpu,
                                                {.forward = pool_forward, .backward = pool_backward});
const RegisterKernels<GlobalAveragePoolKernels> average_kernels(DeviceKind::cpu,
                                                                {.forward = average_forward,
                                                                 .backward = average_backward});

}  // namespace
}  // namespace topknot
