#pragma once
// An op's value and gradients for given inputs and a given gradient of its value, in N, C, H, W order, on any
// device.

#include "tests/support/variables.h"

namespace topknot::testing {

struct Probe {
  Shape shape;  // of the value
  std::vector<float> value;
  std::vector<std::vector<float>> gradients;  // of the inputs
  bool operator==(const Probe&) const = default;
};

// An activation, or a parameter, which stays plain and f32.
struct Input {
  Shape shape;
  std::vector<float> values;
  Layout layout = Layout::plain;
  bool parameter = false;
};
using Op = std::function<Variable(std::span<const Variable>)>;

// With activations of `type`; on a GPU images are nhwc. No gradients without `dy`.
inline Probe probe(const Op& op, const std::vector<Input>& inputs, const std::vector<float>& dy,
                   Device device, DType type) {
  std::vector<std::unique_ptr<Leaf>> leaves;
  std::vector<Variable> x;
  for (const Input& in : inputs) {
    leaves.push_back(std::make_unique<Leaf>(in.shape, in.values, device));
    const bool nhwc = device.kind != DeviceKind::cpu && in.shape.rank() == 4;
    const Variable& leaf = leaves.back()->variable();
    x.push_back(in.parameter ? leaf : in_form(leaf, nhwc ? Layout::nhwc : in.layout, type));
  }
  const Variable y = op(x);
  Probe result{y.shape(), values_of(y), {}};
  if (dy.empty()) return result;
  backward(weighted_sum(y, dy));
  for (const auto& leaf : leaves) result.gradients.push_back(leaf->gradient());
  return result;
}

}  // namespace topknot::testing
