#pragma once
// What tests of ops need on any device: leaves with given values, activations of them, a loss with a chosen
// gradient, comparison by magnitude.

#include <utility>

#include "nn/core/bfloat16.h"
#include "nn/ops/kernels.h"
#include "tests/support/error_text.h"
#include "tests/support/on_device.h"
#include "tests/support/reference.h"
#include "tests/support/same_bits.h"
#include "tests/support/threads.h"

namespace topknot::testing {

using reference::Array;

// Standard normal numbers plus `mean`; each stream its own.
inline std::vector<float> random_values(std::int64_t n, std::uint32_t stream, float mean = 0.0f) {
  const CounterRng rng(2024, RngUse::test, stream);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + rng.normal(i);
  return values;
}

// What is left of values that go through memory of this type.
inline std::vector<float> rounded_to(DType type, std::vector<float> values) {
  if (type == DType::bf16)
    for (float& value : values) value = to_float(to_bfloat16(value));
  return values;
}
// Such numbers as activations hold them.
inline std::vector<float> random_activations(std::int64_t n, std::uint32_t stream, float mean = 0.0f) {
  return rounded_to(activation_type(), random_values(n, stream, mean));
}

// A tolerance of what is rounded to an activation: `f32`, or bfloat16's error of at most 2^-8.
inline double rounding(double f32) {
  return activation_type() == DType::bf16 ? 1.01 / 256 : f32;
}

inline Array as_double(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// One parameter in a store of its own, so that any tensor can be differentiated by.
class Leaf {
 public:
  Leaf(const Shape& shape, const std::vector<float>& values, Device device = test_device())
      : store_(device),
        parameter_(&store_.add("leaf", shape, [values](std::span<float> out, const CounterRng&) {
          std::copy(values.begin(), values.end(), out.begin());
        })) {
    store_.build([](const Parameter&) { return true; }, 1);
  }
  const Variable& variable() const { return parameter_->variable(); }
  Parameter& parameter() { return *parameter_; }
  std::vector<float> gradient() const {
    return Tensor::view(parameter_->gradient(), parameter_->shape(), store_.device()).to_vector();
  }
  void clear() const { store_.arena().mark_gradients_unwritten(); }

 private:
  mutable ParameterStore store_;
  Parameter* parameter_;
};

// Whole numbers in the device's memory: labels, lengths.
class DeviceNumbers {
 public:
  DeviceNumbers(const std::vector<std::int32_t>& numbers) : size_(numbers.size()) {
    std::vector<float> bits(size_ + 1);  // a tensor is not empty
    if (size_ > 0) std::memcpy(bits.data(), numbers.data(), size_ * sizeof(float));
    bits_ = Tensor::from(bits, {static_cast<std::int64_t>(size_) + 1}, test_device());
  }
  operator std::span<const std::int32_t>() const { return {bits_.as<std::int32_t>(), size_}; }

 private:
  std::size_t size_;
  Tensor bits_;
};

// The same values in another form, differentiable: leaves are always plain and f32, activations need not be.
inline Variable in_form(const Variable& x, Layout layout, DType type) {
  const Layout from = x.value().layout();
  const DType of = x.value().dtype();
  if (from == layout && of == type) return x;
  return {"in_form", in_form(x.value(), layout, type), {x}, [x, from, of](Tensor grad) {
            x.accumulate_grad(in_form(grad, from, of));
          }};
}
inline Variable in_layout(const Variable& x, Layout layout) {
  return in_form(x, layout, x.value().dtype());
}
// As the device's ops leave it.
inline Variable activation(const Variable& x, Layout layout = Layout::plain) {
  return in_form(x, layout, activation_type());
}

// sum_i y[i] dy[i], over N, C, H, W order: its gradient by y is dy.
inline Variable weighted_sum(const Variable& y, const std::vector<float>& dy) {
  double sum = 0;
  const std::vector<float> values = to_layout(y.value(), Layout::plain).to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) sum += static_cast<double>(values[i]) * dy.at(i);
  const Device device = y.value().device();
  return {"weighted_sum",
          Tensor::from({static_cast<float>(sum)}, {1}, device),
          {y},
          [y, dy, device](Tensor grad) {
            const float by = grad.to_vector()[0];
            std::vector<float> scaled = dy;
            for (float& v : scaled) v *= by;
            y.accumulate_grad(
                in_form(Tensor::from(scaled, y.shape(), device), y.value().layout(), y.value().dtype()));
          }};
}

// The backward pass of a loss whose gradient by each of `outputs` is given in plain order.
inline void backward_from(const std::vector<std::pair<Variable, std::vector<float>>>& outputs) {
  std::vector<Variable> sums;
  for (const auto& [y, dy] : outputs) sums.push_back(weighted_sum(y, dy));
  const Tensor loss = Tensor::zeros({1}, Layout::plain, sums.front().value().device());
  backward(Variable("loss", loss, sums, [&sums](Tensor grad) {
    for (const Variable& sum : sums) sum.accumulate_grad(grad);
  }));
}

// In plain order.
inline std::vector<float> values_of(const Variable& y) {
  return to_layout(y.value(), Layout::plain).to_vector();
}

// |actual - expected| <= tolerance * scale for each element; NaN fails.
inline void check_close(const std::string& what, const std::vector<float>& actual, const Array& expected,
                        const Array& scale, double tolerance) {
  INFO(what);
  REQUIRE(actual.size() == expected.size());
  REQUIRE(scale.size() == expected.size());
  std::size_t worst = 0, bad = 0;
  double worst_ratio = -1;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]), ratio = error / (scale[i] + 1e-30);
    const bool fits = error <= tolerance * scale[i] + 1e-30;
    if (!fits) ++bad;
    if (!(ratio <= worst_ratio)) worst = i, worst_ratio = ratio;
  }
  if (actual.empty()) return;
  INFO("worst element " << worst << ": " << actual[worst] << " for " << expected[worst] << ", error "
                        << worst_ratio << " of the magnitude " << scale[worst] << ", allowed " << tolerance);
  CHECK(bad == 0);
}

inline void check_close(const std::string& what, const std::vector<float>& actual, const Array& expected,
                        double tolerance) {
  check_close(what, actual, expected, reference::absolute(expected), tolerance);
}

// Sets the compute threads of the calling thread for one scope.
}  // namespace topknot::testing
