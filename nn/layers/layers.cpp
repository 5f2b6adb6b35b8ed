#include "nn/layers/layers.h"

namespace topknot {
namespace {

Parameter* conv_weight(ParameterStore& store, const std::string& name, const ConvGeometry& g) {
  return &store.add(name + ".weight", g.weight_shape(), kaiming_normal(g.weight_shape().numel() / g.out));
}

BatchNormState running_statistics(ParameterStore& store, const std::string& name, std::int64_t channels) {
  const auto size = static_cast<std::size_t>(channels);
  Buffer& mean = store.add_buffer(name + ".running_mean", size, 0.0f);
  return {&mean, &store.add_buffer(name + ".running_variance", size, 1.0f)};
}

}  // namespace

Conv2d::Conv2d(ParameterStore& store, const std::string& name, const ConvGeometry& geometry, bool bias)
    : geometry_(geometry), weight_(conv_weight(store, name, geometry)) {
  if (bias) bias_ = &store.add(name + ".bias", {geometry.out}, constant(0.0f));
}

BatchNorm::BatchNorm(ParameterStore& store, const std::string& name, std::int64_t channels, bool relu)
    : relu_(relu),
      gamma_(&store.add(name + ".gamma", {channels}, constant(1.0f))),
      beta_(&store.add(name + ".beta", {channels}, constant(0.0f))),
      state_(running_statistics(store, name, channels)) {}

Variable activate(const Variable& x, Activation activation) {
  switch (activation) {
    case Activation::relu:
      return relu(x);
    case Activation::relu6:
      return relu6(x);
    case Activation::hardswish:
      return hardswish(x);
    case Activation::silu:
      return silu(x);
    default:
      return x;
  }
}

ConvBn::ConvBn(ParameterStore& store, const std::string& name, const ConvGeometry& geometry,
               Activation activation, float epsilon)
    : geometry_(geometry),
      activation_(activation),
      weight_(conv_weight(store, name + ".conv", geometry)),
      gamma_(&store.add(name + ".bn.gamma", {geometry.out}, constant(1.0f))),
      beta_(&store.add(name + ".bn.beta", {geometry.out}, constant(0.0f))),
      state_(running_statistics(store, name + ".bn", geometry.out)) {
  state_.epsilon = epsilon;
}

Variable ConvBn::forward(const Variable& x, const Variable& residual, const ForwardContext& context) {
  const bool fused = activation_ == Activation::relu;
  const Variable y = conv_bn(x, context.use(*weight_), context.use(*gamma_), context.use(*beta_), residual,
                             geometry_, state_, {context.training, fused});
  return fused ? y : activate(y, activation_);
}

Linear::Linear(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t out)
    : weight_(&store.add(name + ".weight", {out, in}, uniform(1.0f / std::sqrt(static_cast<float>(in))))),
      bias_(&store.add(name + ".bias", {out}, uniform(1.0f / std::sqrt(static_cast<float>(in))))) {}

Variable Branches::forward(const Variable& x, const ForwardContext& context) {
  std::vector<Variable> parts;
  for (const ModulePtr& module : modules_) parts.push_back(module->forward(x, context));
  return concat(parts);
}

Variable Dropout::forward(const Variable& x, const ForwardContext& context) {
  if (!context.training) return x;
  // 12 bits for the layer, 20 for the rank; the step has a word of its own.
  return dropout(x, p_, CounterRng(context.seed, RngUse::dropout, context.step, context.rank << 12 | index_),
                 context.gpu_step);
}

}  // namespace topknot
