#pragma once
// Modules, which own parameters (registered in a store) and compute with ops, without a backward of their
// own; and models' layers. Names are prefixes: "block1.conv" registers "block1.conv.weight".

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nn/core/parameter.h"
#include "nn/core/rng.h"
#include "nn/ops/ops.h"

namespace topknot {

struct ForwardContext {
  bool training = true;    // batch statistics, dropout, and a graph for the backward pass
  std::uint64_t seed = 1;  // of dropout; ranks differ by `rank`, steps by `step`
  std::uint32_t rank = 0;
  std::uint32_t step = 0;
  DType cpu_activations =
      DType::f32;  // on a CPU, of embeddings: what an image's input has, tokens cannot show
  const std::uint32_t* gpu_step = nullptr;  // in GPU memory: takes the place of `step` there, for graphs
  // For a model that transcribes: the output frames of each recording (Module::output_frames), on the model's
  // device until the backward pass has been; the rest is padding. Empty: recordings of one length.
  std::span<const std::int32_t> frames;

  // A parameter as the graph's leaf, or as a constant if no gradient is wanted.
  Variable use(const Parameter& parameter) const {
    return training ? parameter.variable() : Variable(parameter.variable().value());
  }
};

class Module {
 public:
  virtual ~Module() = default;
  virtual Variable forward(const Variable& x, const ForwardContext& context) = 0;
  // Whether the input is a batch of token sequences, as embedding()'s, and the output rows of logits.
  virtual bool reads_tokens() const { return false; }
  // For a model that reads tokens: the mean loss of its logits for an input x, as softmax_cross_entropy() has
  // it. A model whose output layer and loss are one op makes no matrix of logits here.
  virtual Variable loss(const Variable& x, std::span<const std::int32_t> labels, float smoothing,
                        const ForwardContext& context) {
    return softmax_cross_entropy(forward(x, context), labels, smoothing);
  }
  // For a model that transcribes: its number of output frames for so many input frames. It gives rows of
  // logits frame by frame, as ctc_loss() takes them. 0 for other models.
  virtual std::int64_t output_frames(std::int64_t /*frames*/) const { return 0; }
};

using ModulePtr = std::unique_ptr<Module>;

class Sequential final : public Module {
 public:
  void add(ModulePtr module) { modules_.push_back(std::move(module)); }
  template <class M, class... Args>
  void add(Args&&... args) {
    modules_.push_back(std::make_unique<M>(std::forward<Args>(args)...));
  }
  Variable forward(const Variable& x, const ForwardContext& context) override {
    Variable y = x;
    for (auto& module : modules_) y = module->forward(y, context);
    return y;
  }

 private:
  std::vector<ModulePtr> modules_;
};

inline Initializer constant(float value) {
  return
      [value](std::span<float> values, const CounterRng&) { std::fill(values.begin(), values.end(), value); };
}

// Normal with std = sqrt(2 / fan_in) (He et al., ICCV 2015).
inline Initializer kaiming_normal(std::int64_t fan_in) {
  const float std = std::sqrt(2.0f / static_cast<float>(fan_in));
  return [std](std::span<float> values, const CounterRng& rng) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = std * rng.normal(i);
  };
}

// Uniform in [-bound, bound).
inline Initializer uniform(float bound) {
  return [bound](std::span<float> values, const CounterRng& rng) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = bound * (2.0f * rng.uniform(i) - 1.0f);
  };
}

// Weight: Kaiming normal, std = sqrt(2 / fan_in) (He et al., ICCV 2015). Bias, if asked for: zero.
class Conv2d final : public Module {
 public:
  Conv2d(ParameterStore& store, const std::string& name, const ConvGeometry& geometry, bool bias = true);
  Variable forward(const Variable& x, const ForwardContext& context) override {
    return conv2d(x, context.use(*weight_), bias_ ? context.use(*bias_) : Variable(), geometry_);
  }

 private:
  ConvGeometry geometry_;
  Parameter *weight_, *bias_ = nullptr;
};

// Batch norm on its own, optionally with ReLU. gamma 1, beta 0, running mean 0 and variance 1 at first.
class BatchNorm final : public Module {
 public:
  BatchNorm(ParameterStore& store, const std::string& name, std::int64_t channels, bool relu = false);
  Variable forward(const Variable& x, const ForwardContext& context) override {
    return batch_norm(x, context.use(*gamma_), context.use(*beta_), {}, state_, {context.training, relu_});
  }

 private:
  bool relu_;
  Parameter *gamma_, *beta_;
  BatchNormState state_;
};

enum class Activation { none, relu, relu6, hardswish, silu };
Variable activate(const Variable& x, Activation activation);

// Convolution without bias, batch norm, optionally a residual and an activation; fused if that is ReLU.
class ConvBn final : public Module {
 public:
  ConvBn(ParameterStore& store, const std::string& name, const ConvGeometry& geometry,
         Activation activation = Activation::relu, float epsilon = 1e-5f);
  Variable forward(const Variable& x, const ForwardContext& context) override {
    return forward(x, {}, context);
  }
  Variable forward(const Variable& x, const Variable& residual, const ForwardContext& context);

 private:
  ConvGeometry geometry_;
  Activation activation_;
  Parameter *weight_, *gamma_, *beta_;
  BatchNormState state_;
};

// Weight and bias: uniform in +-1 / sqrt(in).
class Linear final : public Module {
 public:
  Linear(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t out);
  Variable forward(const Variable& x, const ForwardContext& context) override {
    return linear(x, context.use(*weight_), context.use(*bias_));
  }

 private:
  Parameter *weight_, *bias_;
};

class Pool final : public Module {
 public:
  explicit Pool(const PoolGeometry& geometry) : geometry_(geometry) {}
  Variable forward(const Variable& x, const ForwardContext&) override { return pool(x, geometry_); }

 private:
  PoolGeometry geometry_;
};

// An op without parameters as a module.
template <Variable (*op)(const Variable& x)>
class Apply final : public Module {
 public:
  Variable forward(const Variable& x, const ForwardContext&) override { return op(x); }
};
using Relu = Apply<relu>;
using GlobalAveragePool = Apply<global_average_pool>;
using Flatten = Apply<flatten>;

// Modules side by side: their channels one after the other.
class Branches final : public Module {
 public:
  void add(ModulePtr module) { modules_.push_back(std::move(module)); }
  Variable forward(const Variable& x, const ForwardContext& context) override;

 private:
  std::vector<ModulePtr> modules_;
};

// `index` tells apart the dropout layers of a model: each draws numbers of its own.
class Dropout final : public Module {
 public:
  Dropout(float p, std::uint32_t index) : p_(p), index_(index) {}
  Variable forward(const Variable& x, const ForwardContext& context) override;

 private:
  float p_;
  std::uint32_t index_;
};

}  // namespace topknot
