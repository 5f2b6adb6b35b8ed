#pragma once
// The layers that models are made of. Names are prefixes: "block1.conv" registers "block1.conv.weight".

#include <functional>
#include <utility>
#include <vector>

#include "nn/layers/module.h"
#include "nn/ops/ops.h"

namespace topknot {

// Weight: Kaiming normal, std = sqrt(2 / fan_in) (He et al., ICCV 2015). Bias, where asked for: zero.
class Conv2d final : public Module {
 public:
  Conv2d(ParameterStore& store, const std::string& name, const ConvGeometry& geometry, bool bias = true);
  Variable forward(const Variable& x, const ForwardContext& context) override;

 private:
  ConvGeometry geometry_;
  Parameter *weight_, *bias_ = nullptr;
};

// Batch norm on its own, optionally with ReLU. gamma 1, beta 0, running mean 0 and variance 1 at first.
class BatchNorm final : public Module {
 public:
  BatchNorm(ParameterStore& store, const std::string& name, std::int64_t channels, bool relu = false);
  Variable forward(const Variable& x, const ForwardContext& context) override;

 private:
  bool relu_;
  Parameter *gamma_, *beta_;
  BatchNormState state_;
};

enum class Activation { none, relu, relu6, hardswish, silu };
Variable activate(const Variable& x, Activation activation);

// Convolution without bias, batch norm, then optionally a residual and an activation; all fused up to ReLU, other
// activations are ops of their own.
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
  Variable forward(const Variable& x, const ForwardContext& context) override;

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

class Relu final : public Module {
 public:
  Variable forward(const Variable& x, const ForwardContext& context) override;
};

class GlobalAveragePool final : public Module {
 public:
  Variable forward(const Variable& x, const ForwardContext& context) override;
};

class Flatten final : public Module {
 public:
  Variable forward(const Variable& x, const ForwardContext& context) override;
};

// An op without parameters as a module.
class Apply final : public Module {
 public:
  explicit Apply(std::function<Variable(const Variable&)> op) : op_(std::move(op)) {}
  Variable forward(const Variable& x, const ForwardContext&) override { return op_(x); }

 private:
  std::function<Variable(const Variable&)> op_;
};

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
