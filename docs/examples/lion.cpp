// An optimizer in one file: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2).
// With g the averaged gradient:
//
//   w = w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
//   m = beta2 * m + (1 - beta2) * g
#include <algorithm>

#include "nn/core/base/check.h"
#include "optim/optimizer.h"

namespace topknot {
namespace {

class Lion final : public Optimizer {
 public:
  Lion(const OptimizerOptions& options, ParameterArena& arena)
      : options_(options), arena_(arena), ranges_(decay_ranges(options, arena)), mean_(arena.size()) {}

  // A run with gradients of another form is refused before its first step.
  bool takes(GradientForm form) const override { return form == GradientForm::plain; }

  void update(std::size_t offset, std::span<const float> gradient, const OptimizerStep& step,
              GradientForm form) override {
    const std::size_t end = offset + gradient.size();
    TOPKNOT_CHECK(end <= arena_.size() && takes(form), "a slice outside the arena, or of another form");
    const auto rate = static_cast<float>(step.lr), scale = static_cast<float>(step.gradient_scale);
    for (const DecayRange& range : ranges_) {
      const auto decay = static_cast<float>(range.decays ? options_.weight_decay : 0.0);
      for (std::size_t i = std::max(offset, range.begin); i < std::min(end, range.end); ++i) {
        const float g = gradient[i - offset] * scale, u = kBeta1 * mean_[i] + (1 - kBeta1) * g;
        float& w = arena_.weights()[i];
        w = w - rate * (static_cast<float>((u > 0) - (u < 0)) + decay * w);
        mean_[i] = kBeta2 * mean_[i] + (1 - kBeta2) * g;
      }
    }
  }

  // Saved with checkpoints.
  std::vector<std::span<float>> state() override { return {mean_}; }

 private:
  static constexpr float kBeta1 = 0.9f, kBeta2 = 0.99f;
  OptimizerOptions options_;
  ParameterArena& arena_;
  std::vector<DecayRange> ranges_;
  std::vector<float> mean_;  // of the gradient, of the arena's shape
};

const bool lion_registered = (optimizers().add("lion", "Lion: the worked example of docs/extending.md",
                                               [](const OptimizerOptions& options, ParameterArena& arena) {
                                                 return std::unique_ptr<Optimizer>(new Lion(options, arena));
                                               }),
                              true);

}  // namespace
}  // namespace topknot
