// An optimizer in one file: AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019), as
// torch.optim.AdamW computes it. With t = 1, 2, ... the step and g the averaged gradient:
//
//   w = w - lr * weight_decay * w
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g^2
//   w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
#include <algorithm>
#include <cmath>

#include "nn/core/base/check.h"
#include "optim/optimizer.h"

namespace topknot {
namespace {

class AdamW final : public Optimizer {
 public:
  AdamW(const OptimizerOptions& options, ParameterArena& arena)
      : options_(options),
        arena_(arena),
        ranges_(decay_ranges(options, arena)),
        first_(arena.size()),
        second_(arena.size()) {
    if (options.momentum > 0 || options.nesterov)
      throw UserError("optimizer.momentum and optimizer.nesterov are not AdamW's: leave them out");
  }

  void update(std::size_t offset, std::span<const float> gradient, const OptimizerStep& step,
              GradientForm form) override {
    const std::size_t end = offset + gradient.size();
    TOPKNOT_CHECK(end <= arena_.size(), "a slice outside the arena");
    if (form != GradientForm::plain)
      throw UserError("optimizer.name: adamw takes gradients without momentum and learning rate in them");
    const double t = static_cast<double>(step.step + 1);
    const auto rate = static_cast<float>(step.lr / (1 - std::pow(kBeta1, t)));
    const auto correction = static_cast<float>(1 / (1 - std::pow(kBeta2, t)));
    for (const DecayRange& range : ranges_) {
      const auto decay = static_cast<float>(range.decays ? 1 - step.lr * options_.weight_decay : 1.0);
      for (std::size_t i = std::max(offset, range.begin); i < std::min(end, range.end); ++i) {
        const float g = gradient[i - offset] * static_cast<float>(step.gradient_scale);
        first_[i] = kBeta1 * first_[i] + (1 - kBeta1) * g;
        second_[i] = kBeta2 * second_[i] + (1 - kBeta2) * g * g;
        float& w = arena_.weights()[i];
        w = w * decay - rate * first_[i] / (std::sqrt(second_[i] * correction) + kEpsilon);
      }
    }
  }

  // Saved with checkpoints.
  std::vector<std::span<float>> state() override { return {first_, second_}; }

 private:
  static constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kEpsilon = 1e-8f;
  OptimizerOptions options_;
  ParameterArena& arena_;
  std::vector<DecayRange> ranges_;
  std::vector<float> first_, second_;  // moments, of the arena's shape
};

const bool adamw_registered =
    (optimizers().add("adamw", "AdamW: the worked example of docs/extending.md",
                      [](const OptimizerOptions& options, ParameterArena& arena) {
                        return std::unique_ptr<Optimizer>(new AdamW(options, arena));
                      }),
     true);

}  // namespace
}  // namespace topknot
