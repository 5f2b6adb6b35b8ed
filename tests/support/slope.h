#pragma once
// Gradients of whole networks against the loss itself.

#include <span>

#include "nn/core/parameter.h"
#include "tests/support/catch.h"

namespace topknot::testing {

// The derivative of the loss along the gradient of `parameters`, by a difference over steps of `h`, is that
// gradient's norm. By default a step whose effect is well above the loss's rounding and small enough to cross
// few of ReLU's kinks.
template <class Loss>
void check_slope(std::span<Parameter* const> parameters, const Loss& loss, double h = 0) {
  std::vector<std::vector<float>> before;
  double norm = 0;
  for (const Parameter* p : parameters) {
    before.emplace_back(p->value(), p->value() + p->numel());
    for (std::size_t i = 0; i < p->numel(); ++i)
      norm += static_cast<double>(p->gradient()[i]) * p->gradient()[i];
  }
  norm = std::sqrt(norm);
  REQUIRE(norm > 0);
  if (h == 0) h = std::min(5e-4 / norm, 3e-3);
  double side[2];
  for (const int s : {0, 1}) {
    for (std::size_t k = 0; k < parameters.size(); ++k)
      for (std::size_t i = 0; i < parameters[k]->numel(); ++i)
        parameters[k]->value()[i] =
            static_cast<float>(before[k][i] + (s ? h : -h) * parameters[k]->gradient()[i] / norm);
    side[s] = loss();
  }
  for (std::size_t k = 0; k < parameters.size(); ++k)
    std::copy(before[k].begin(), before[k].end(), parameters[k]->value());
  INFO(parameters[0]->name() << ", " << parameters.size() << " parameters: gradient norm " << norm
                             << ", step " << h);
  CHECK((side[1] - side[0]) / (2 * h) == Approx(norm).epsilon(0.02));
}

}  // namespace topknot::testing
