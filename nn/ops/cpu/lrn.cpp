// Local response normalisation by oneDNN.
#include <map>
#include <tuple>

#include "nn/core/threads.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

struct LrnPlan {
  std::unique_ptr<DnnlKernel> forward, backward;
  std::int64_t workspace_floats = 0;
};

std::shared_ptr<const LrnPlan> make_lrn_plan(const LrnOptions& o, const Tensor& x) {
  auto result = std::make_shared<LrnPlan>();
  const auto data = activation_desc(x.shape(), x.layout());
  const auto algorithm = dnnl::algorithm::lrn_across_channels;
  const float alpha = o.alpha * static_cast<float>(o.size);  // oneDNN's is of the mean of the squares
  const auto attributes = user_scratchpad();
  const dnnl::lrn_forward::primitive_desc f(
      {dnnl::prop_kind::forward_training, algorithm, data, o.size, alpha, o.beta, o.k}, attributes,
      dnnl_cpu_engine());
  const dnnl::lrn_backward::primitive_desc b({algorithm, data, data, o.size, alpha, o.beta, o.k}, attributes,
                                             dnnl_cpu_engine(), f);
  DnnlKernel::Arguments forward{{DNNL_ARG_SRC, data}, {DNNL_ARG_DST, data}};
  DnnlKernel::Arguments backward{{DNNL_ARG_SRC, data}, {DNNL_ARG_DIFF_DST, data}, {DNNL_ARG_DIFF_SRC, data}};
  if (const std::size_t bytes = f.workspace_desc().get_size()) {
    forward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
    backward.emplace_back(DNNL_ARG_WORKSPACE, f.workspace_desc());
    result->workspace_floats = static_cast<std::int64_t>((bytes + 3) / 4);
  }
  result->forward = std::make_unique<DnnlKernel>(dnnl::lrn_forward(f), forward, f.scratchpad_desc(), 1);
  result->backward = std::make_unique<DnnlKernel>(dnnl::lrn_backward(b), backward, b.scratchpad_desc(), 1);
  return result;
}

// The calling thread's, made once for each geometry, shape and number of compute threads: a primitive keeps that number.
std::shared_ptr<const LrnPlan> lrn_plan_for(const LrnOptions& o, const Tensor& x) {
  using Key = std::tuple<LrnOptions, std::array<std::int64_t, 4>, Layout, int>;
  thread_local std::map<Key, std::shared_ptr<const LrnPlan>> plans;
  auto& plan = plans[{o, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, x.layout(), team_size()}];
  if (!plan) plan = make_lrn_plan(o, x);
  return plan;
}

struct LrnKept {
  std::shared_ptr<const LrnPlan> plan;
  Tensor workspace;
};

OpState lrn_forward(const LrnOptions& options, const Tensor& x, Tensor& y) {
  const auto plan = lrn_plan_for(options, x);
  Tensor workspace = plan->workspace_floats ? Tensor::empty({plan->workspace_floats}) : Tensor();
  if (workspace.defined())
    plan->forward->run(0, {x.data(), y.data(), workspace.data()});
  else
    plan->forward->run(0, {x.data(), y.data()});
  return std::make_shared<LrnKept>(LrnKept{plan, std::move(workspace)});
}

void lrn_backward(const LrnOptions&, const OpState& state, const Tensor& x, const Tensor& dy, Tensor& dx) {
  const auto& kept = state_as<LrnKept>(state);
  if (kept.workspace.defined())
    kept.plan->backward->run(0, {x.data(), dy.data(), dx.data(), kept.workspace.data()});
  else
    kept.plan->backward->run(0, {x.data(), dy.data(), dx.data()});
}

const RegisterKernels<LrnKernels> lrn_registered(DeviceKind::cpu,
                                                 {.forward = lrn_forward, .backward = lrn_backward});

}  // namespace
}  // namespace topknot
