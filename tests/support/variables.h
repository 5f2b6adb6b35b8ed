#pragma once
// What tests of ops need: leaves with given values, a loss with a chosen gradient, comparison by magnitude.

#include <omp.h>

#include <string>
#include <vector>

#include "nn/core/parameter.h"
#include "nn/core/rng.h"
#include "nn/ops/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/reference.h"

namespace topknot::testing {

using reference::Array;

// Standard normal numbers plus `mean`; each stream its own.
inline std::vector<float> random_values(std::int64_t n, std::uint32_t stream, float mean = 0.0f) {
  const CounterRng rng(2024, RngUse::test, stream);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + rng.normal(i);
  return values;
}

inline Array as_double(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// One parameter in a store of its own, so that any tensor can be differentiated by.
class Leaf {
 public:
  Leaf(const Shape& shape, const std::vector<float>& values, const std::string& name = "leaf")
      : parameter_(&store_.add(name, shape, [values](std::span<float> out, const CounterRng&) {
          std::copy(values.begin(), values.end(), out.begin());
        })) {
    store_.build([](const Parameter&) { return true; }, 1);
  }
  const Variable& variable() const { return parameter_->variable(); }
  Parameter& parameter() { return *parameter_; }
  std::vector<float> gradient() const {
    return {parameter_->gradient(), parameter_->gradient() + parameter_->numel()};
  }
  void clear() { store_.arena().clear_gradients(); }

 private:
  ParameterStore store_;
  Parameter* parameter_;
};

// The same values in another layout, differentiable: leaves are always plain, activations need not be.
inline Variable in_layout(const Variable& x, Layout layout) {
  if (x.value().layout() == layout) return x;
  const Layout from = x.value().layout();
  return {"in_layout", to_layout(x.value(), layout), {x}, [x, from](Tensor grad) {
            x.accumulate_grad(to_layout(grad, from));
          }};
}

// sum_i y[i] dy[i], over N, C, H, W order: its gradient by y is dy.
inline Variable weighted_sum(const Variable& y, const std::vector<float>& dy) {
  double sum = 0;
  const std::vector<float> values = to_layout(y.value(), Layout::plain).to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) sum += static_cast<double>(values[i]) * dy.at(i);
  return {"weighted_sum", Tensor::from({static_cast<float>(sum)}, {1}), {y}, [y, dy](Tensor grad) {
            std::vector<float> scaled = dy;
            for (float& v : scaled) v *= grad.data()[0];
            y.accumulate_grad(to_layout(Tensor::from(scaled, y.shape()), y.value().layout()));
          }};
}

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
class Threads {
 public:
  explicit Threads(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace topknot::testing
