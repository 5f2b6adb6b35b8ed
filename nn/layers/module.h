#pragma once
// A layer or a model: it owns parameters (registered in a store) and computes with ops; it has no backward of
// its own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/core/parameter.h"
#include "nn/core/rng.h"

namespace topknot {

// What a forward pass runs under.
struct ForwardContext {
  bool training = true;    // batch statistics, dropout, and a graph for the backward pass
  std::uint64_t seed = 1;  // of dropout; ranks differ by `rank`, steps by `step`
  std::uint32_t rank = 0;
  std::uint32_t step = 0;
  DType cpu_activations =
      DType::f32;  // on a CPU, of embeddings: what an image's input has, tokens cannot show
  const std::uint32_t* gpu_step = nullptr;  // in GPU memory: takes the place of `step` there, for graphs
  // Of a model that transcribes: output frames of each recording (Module::output_frames), on the model's device and there
  // until the backward pass has been. The rest of a batch is padding. Empty: recordings of one length.
  std::span<const std::int32_t> frames;

  // A parameter as the graph's leaf, or as a constant where no gradient is wanted.
  Variable use(const Parameter& parameter) const {
    return training ? parameter.variable() : Variable(parameter.variable().value());
  }
};

class Module {
 public:
  virtual ~Module() = default;
  virtual Variable forward(const Variable& x, const ForwardContext& context) = 0;
  // Whether the input is a batch of token sequences, as embedding() has them, and the output a row of logits for
  // each token, step by step.
  virtual bool reads_tokens() const { return false; }
  // Of a model that transcribes: how many frames it gives for an input of so many; rows of logits frame by frame, as ctc_loss()
  // takes them. 0 for other models.
  virtual std::int64_t output_frames(std::int64_t /*frames*/) const { return 0; }
};

using ModulePtr = std::unique_ptr<Module>;

// Modules one after the other.
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

// First values of parameters.
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

}  // namespace topknot
