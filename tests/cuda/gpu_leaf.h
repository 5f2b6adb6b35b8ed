#pragma once
// What tests of ops on a GPU alone need: tensors in an activation's layout and type from plain values and
// back, inputs that catch their gradient, parameters in a GPU's arena.
#include "tests/cuda/device_vector.h"
#include "tests/support/probe.h"

namespace topknot::testing {

// On the current context's GPU; rounded to `type`.
inline Tensor gpu_tensor(const std::vector<float>& plain, const Shape& shape, Layout layout, DType type) {
  return in_form(Tensor::from(plain, shape, cuda::Context::current().device()), layout, type);
}

// In plain order.
inline std::vector<float> values_of(const Tensor& tensor) {
  return to_layout(tensor, Layout::plain).to_vector();
}

// A parameter in the arena of the current context's GPU.
struct GpuLeaf : Leaf {
  GpuLeaf(const Shape& shape, const std::vector<float>& values)
      : Leaf(shape, values, cuda::Context::current().device()) {}
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

// On the current context's GPU, in its type, or on the CPU.
inline Probe probe(const Op& op, const std::vector<Input>& inputs, const std::vector<float>& dy,
                   bool on_gpu) {
  if (!on_gpu) return probe(op, inputs, dy, Device{}, DType::f32);
  const cuda::Context& context = cuda::Context::current();
  return probe(op, inputs, dy, context.device(), context.activation_type());
}

}  // namespace topknot::testing
