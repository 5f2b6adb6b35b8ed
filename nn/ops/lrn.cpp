#include <map>
#include <tuple>

#include "nn/core/threads.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable local_response_norm(const Variable& x, const LrnOptions& options) {
  TOPKNOT_CHECK(x.shape().rank() == 4,
                "local_response_norm: input must be [N, C, H, W], not " + x.shape().str());
  TOPKNOT_CHECK(options.size > 0 && options.size % 2 == 1 && options.k > 0 && options.alpha >= 0,
                "local_response_norm: an odd number of channels, a positive k, alpha at least 0");
  if (needs_f32(x)) return cast(local_response_norm(cast(x, DType::f32), options), DType::bf16);
  const auto& kernels = kernels_for<LrnKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  const OpState state = kernels.forward(options, x.value(), y);
  return op_on("local_response_norm", x, y, [=, &kernels](const Tensor& grad, Tensor& dx) {
    kernels.backward(options, state, x.value(), grad, dx);
  });
}

namespace {

// On a CPU: by oneDNN. The calling thread's, made once for each geometry, shape and number of threads.
std::shared_ptr<const DnnlPair> lrn_primitives(const LrnOptions& o, const Tensor& x) {
  using Key = std::tuple<LrnOptions, std::array<std::int64_t, 4>, Layout, int>;
  thread_local std::map<Key, std::shared_ptr<const DnnlPair>> made;
  auto& pair = made[{o, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, x.layout(), team_size()}];
  if (pair) return pair;
  const auto data = activation_desc(x.shape(), x.layout());
  const auto algorithm = dnnl::algorithm::lrn_across_channels;
  const float alpha = o.alpha * static_cast<float>(o.size);  // oneDNN's is of the mean of the squares
  const auto attributes = user_scratchpad();
  const dnnl::lrn_forward::primitive_desc f(
      {dnnl::prop_kind::forward_training, algorithm, data, o.size, alpha, o.beta, o.k}, attributes,
      dnnl_cpu_engine());
  const dnnl::lrn_backward::primitive_desc b({algorithm, data, data, o.size, alpha, o.beta, o.k}, attributes,
                                             dnnl_cpu_engine(), f);
  return pair = std::make_shared<const DnnlPair>(
             f, DnnlKernel::Arguments{{DNNL_ARG_SRC, data}, {DNNL_ARG_DST, data}}, b,
             DnnlKernel::Arguments{
                 {DNNL_ARG_SRC, data}, {DNNL_ARG_DIFF_DST, data}, {DNNL_ARG_DIFF_SRC, data}});
}

OpState lrn_forward(const LrnOptions& options, const Tensor& x, Tensor& y) {
  return DnnlPair::forward(lrn_primitives(options, x), {x.data(), y.data()});
}

void lrn_backward(const LrnOptions&, const OpState& state, const Tensor& x, const Tensor& dy, Tensor& dx) {
  DnnlPair::backward(state, {x.data(), dy.data(), dx.data()});
}

const bool lrn_registered = add_cpu_kernels<LrnKernels>({.forward = lrn_forward, .backward = lrn_backward});

}  // namespace
}  // namespace topknot
