#pragma once
// What tests of ops on a GPU need: tensors in an activation's layout and type from plain values and back, inputs that
// catch their gradient, parameters in a GPU's arena, a loss with a chosen gradient.

#include <cuda_bf16.h>

#include <memory>
#include <utility>
#include <vector>

#include "nn/core/bfloat16.h"
#include "nn/core/parameter.h"
#include "tests/cuda/device_vector.h"

namespace topknot::testing {

// values[i] of plain order stands at order[i] in memory.
inline std::vector<std::size_t> storage_order(const Shape& shape, Layout layout) {
  std::vector<std::size_t> order(static_cast<std::size_t>(shape.numel()));
  const bool nhwc = layout == Layout::nhwc;
  const std::int64_t channels = nhwc ? shape[1] : 1, pixels = nhwc ? shape[2] * shape[3] : 1;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t pixel = at % pixels, c = at / pixels % channels, n = at / pixels / channels;
    order[i] = static_cast<std::size_t>((n * pixels + pixel) * channels + c);
  }
  return order;
}

// On the current context's GPU; rounded to `type`.
inline Tensor gpu_tensor(const std::vector<float>& plain, const Shape& shape, Layout layout, DType type) {
  const auto order = storage_order(shape, layout);
  Tensor tensor = Tensor::empty(shape, layout, cuda::Context::current().device(), type);
  std::vector<float> stored(plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) stored[order[i]] = plain[i];
  if (type == DType::f32) {
    to_device(tensor.data(), stored);
    return tensor;
  }
  std::vector<BFloat16> rounded(stored.size());
  to_bfloat16(stored.data(), stored.size(), rounded.data());
  to_device(reinterpret_cast<BFloat16*>(tensor.data()), rounded);
  return tensor;
}

// In plain order.
inline std::vector<float> values_of(const Tensor& tensor) {
  const auto order = storage_order(tensor.shape(), tensor.layout());
  const std::vector<float> stored = tensor.to_vector();
  std::vector<float> plain(stored.size());
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = stored[order[i]];
  return plain;
}

// A parameter in the arena of the current context's GPU.
class GpuLeaf {
 public:
  GpuLeaf(const Shape& shape, const std::vector<float>& values)
      : store_(cuda::Context::current().device()),
        parameter_(&store_.add("leaf", shape, [values](std::span<float> out, const CounterRng&) {
          std::copy(values.begin(), values.end(), out.begin());
        })) {
    store_.build([](const Parameter&) { return true; }, 1);
  }
  const Variable& variable() const { return parameter_->variable(); }
  std::vector<float> gradient() const {
    return to_host(static_cast<const float*>(parameter_->gradient()), parameter_->numel());
  }
  void clear() const { store_.arena().clear_gradients(); }

 private:
  mutable ParameterStore store_;
  Parameter* parameter_;
};

// An input of an op, which keeps the gradient that the op hands to it.
class CaughtInput {
 public:
  explicit CaughtInput(const Tensor& value) : below_({1}, {0.0f}), gradient_(std::make_shared<Tensor>()) {
    variable_ = Variable("input", value, {below_.variable()},
                         [to = gradient_](Tensor gradient) { *to = std::move(gradient); });
  }
  const Variable& variable() const { return variable_; }
  std::vector<float> gradient() const { return values_of(*gradient_); }  // plain order

 private:
  GpuLeaf below_;
  std::shared_ptr<Tensor> gradient_;
  Variable variable_;
};

// Runs the backward pass of a loss whose gradient by each of `outputs` is given in plain order.
inline void backward_from(const std::vector<std::pair<Variable, std::vector<float>>>& outputs) {
  std::vector<Variable> inputs;
  for (const auto& [y, dy] : outputs) inputs.push_back(y);
  const Tensor loss = Tensor::zeros({1}, Layout::plain, cuda::Context::current().device());
  backward(Variable("loss", loss, inputs, [outputs](Tensor) {
    for (const auto& [y, dy] : outputs)
      y.accumulate_grad(gpu_tensor(dy, y.shape(), y.value().layout(), y.value().dtype()));
  }));
}

// What is left of values that go through memory of this type.
inline std::vector<float> rounded_to(DType type, std::vector<float> values) {
  if (type == DType::bf16)
    for (float& value : values) value = to_float(to_bfloat16(value));
  return values;
}

}  // namespace topknot::testing
