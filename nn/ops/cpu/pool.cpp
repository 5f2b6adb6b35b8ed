#include <map>

#include "nn/core/base/check.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/cuda_ops.h"
#include "nn/ops/pool.h"

namespace topknot {

class PoolKernels {
 public:
  explicit PoolKernels(const PoolGeometry& geometry) : g_(geometry) {}

  struct Plan {
    std::unique_ptr<DnnlKernel> forward, backward;
    std::int64_t workspace_floats = 0;
    Shape output;
  };

  const Plan& plan(const Tensor& x) {
    auto& found = plans_[{x.dim(0), x.dim(1), x.dim(2), x.dim(3), static_cast<std::int64_t>(x.layout())}];
    if (!found) found = make(x);
    return *found;
  }

 private:
  std::unique_ptr<Plan> make(const Tensor& x) const {
    auto result = std::make_unique<Plan>();
    result->output = {x.dim(0), x.dim(1), g_.output_size(x.dim(2)), g_.output_size(x.dim(3))};
    TOPKNOT_CHECK(result->output[2] > 0 && result->output[3] > 0,
                  "pool: a window larger than " + x.shape().str());
    const auto algorithm = g_.kind == PoolKind::max ? dnnl::algorithm::pooling_max
                                                    : dnnl::algorithm::pooling_avg_exclude_padding;
    const auto src = activation_desc(x.shape(), x.layout()),
               dst = activation_desc(result->output, x.layout());
    const dnnl::memory::dims strides{g_.stride, g_.stride}, window{g_.window, g_.window};
    // oneDNN reads the right and bottom padding; what does not fill a window there is left out.
    const auto low = g_.padding;
    const auto high = [&](std::int64_t size) {
      return (g_.output_size(size) - 1) * g_.stride + g_.window - size - low;
    };
    const dnnl::memory::dims begin{low, low}, end{high(x.dim(2)), high(x.dim(3))};
    const auto attributes = user_scratchpad();
    const dnnl::pooling_forward::primitive_desc f(
        {dnnl::prop_kind::forward_training, algorithm, src, dst, strides, window, begin, end}, attributes,
        dnnl_cpu_engine());
    const dnnl::pooling_backward::primitive_desc b({algorithm, src, dst, strides, window, begin, end},
                                                   attributes, dnnl_cpu_engine(), f);
    DnnlKernel::Arguments forward{{DNNL_ARG_SRC, src}, {DNNL_ARG_DST, dst}};
    DnnlKernel::Arguments backward{{DNNL_ARG_DIFF_DST, dst}, {DNNL_ARG_DIFF_SRC, src}};
    if (g_.kind == PoolKind::max) {
      forward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
      backward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
      result->workspace_floats = static_cast<std::int64_t>(f.workspace_desc().get_size() / sizeof(float) + 1);
    }
    result->forward = std::make_unique<DnnlKernel>(dnnl::pooling_forward(f), forward, f.scratchpad_desc(), 1);
    result->backward =
        std::make_unique<DnnlKernel>(dnnl::pooling_backward(b), backward, b.scratchpad_desc(), 1);
    return result;
  }

 public:
  const PoolGeometry& geometry() const { return g_; }

 private:
  PoolGeometry g_;
  std::map<std::array<std::int64_t, 5>, std::unique_ptr<Plan>> plans_;
};

std::shared_ptr<PoolKernels> make_pool_kernels(const PoolGeometry& geometry) {
  TOPKNOT_CHECK(geometry.window > 0 && geometry.stride > 0 && geometry.padding >= 0 &&
                    geometry.padding < geometry.window,
                "pool: window and stride must be positive, the padding smaller than the window");
  return std::make_shared<PoolKernels>(geometry);
}

Variable pool(const Variable& x, const std::shared_ptr<PoolKernels>& kernels) {
  TOPKNOT_CHECK(x.shape().rank() == 4, "pool: input must be [N, C, H, W], not " + x.shape().str());
  if (on_gpu(x)) return cuda::pool(x, kernels->geometry());
  const auto& plan = kernels->plan(x.value());
  Tensor y = Tensor::empty(plan.output, x.value().layout());
  Tensor workspace = plan.workspace_floats ? Tensor::empty({plan.workspace_floats}) : Tensor();
  if (workspace.defined())
    plan.forward->run(0, {x.value().data(), y.data(), workspace.data()});
  else
    plan.forward->run(0, {x.value().data(), y.data()});

  return {"pool", y, {x}, [=, &plan](Tensor grad) {  // the plan lives in `kernels`
            (void)kernels;
            Tensor dx = Tensor::empty(x.shape(), x.value().layout());
            if (workspace.defined())
              plan.backward->run(0, {grad.data(), dx.data(), workspace.data()});
            else
              plan.backward->run(0, {grad.data(), dx.data()});
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
