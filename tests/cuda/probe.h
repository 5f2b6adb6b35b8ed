#pragma once
// An op's value and gradients for given inputs and a given gradient of its value, from the CPU or from the GPU, in
// N, C, H, W order: what the tests of the GPU's ops compare.

#include <functional>
#include <span>
#include <vector>

#include "nn/core/parameter.h"
#include "nn/ops/cuda/layout.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot::testing {

using testing::random_values;

struct Probe {
  Shape shape;  // of the value
  std::vector<float> value;
  std::vector<std::vector<float>> gradients;  // of the inputs
  bool operator==(const Probe&) const = default;
};

struct Input {
  Shape shape;
  std::vector<float> values;
};
using Op = std::function<Variable(std::span<const Variable>)>;

// On a GPU inputs are activations in the context's type; on the CPU they are plain.
inline Probe probe(const Op& op, const std::vector<Input>& inputs, const std::vector<float>& dy,
                   bool on_gpu) {
  const Device device = on_gpu ? cuda::Context::current().device() : Device{};
  ParameterStore store(device);  // for something that wants a gradient
  const Parameter& leaf = store.add("leaf", {1}, [](std::span<float> v, const CounterRng&) { v[0] = 0; });
  store.build([](const Parameter&) { return true; }, 1);
  const auto here = [&](const std::vector<float>& values, const Shape& shape) {
    const Tensor x = Tensor::from(values, shape);
    return on_gpu ? cuda::to_activation(x) : x;
  };
  const auto plain = [&](const Tensor& x) { return (on_gpu ? cuda::to_plain(x) : x).to_vector(); };

  Probe result;
  result.gradients.resize(inputs.size());
  std::vector<Variable> x;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    x.emplace_back("input", here(inputs[i].values, inputs[i].shape), std::vector<Variable>{leaf.variable()},
                   [&, i](Tensor grad) { result.gradients[i] = plain(grad); });
  const Variable y = op(x);
  result.shape = y.shape();
  result.value = plain(y.value());
  Tensor loss = Tensor::zeros({1}, Layout::plain, device);
  backward({"loss", loss, {y}, [&](Tensor) {
              const Tensor grad = here(dy, y.shape());
              y.accumulate_grad(on_gpu ? in_form(grad, y.value().layout(), y.value().dtype()) : grad);
            }});
  return result;
}

}  // namespace topknot::testing
