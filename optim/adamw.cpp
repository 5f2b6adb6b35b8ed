// AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2), as torch.optim.AdamW computes
// it. With t = 1, 2, ... the step and g the averaged gradient:
//
//   w = w - lr * weight_decay * w
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g^2
//   w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//
// t counts the steps of the run, skipped ones too: a skipped step leaves w, m and v alone and makes the corrections
// that much closer to 1 (PyTorch's loss scaler does not count it).

#include "optim/adamw_rule.h"

#include <algorithm>

#include "nn/core/base/check.h"
#include "optim/optimizer.h"

namespace topknot {
namespace {

constexpr std::size_t kParallelAdamw = 1 << 14;  // elements

class AdamW final : public Optimizer {
 public:
  AdamW(const OptimizerOptions& options, ParameterArena& arena)
      : constants_{options.beta1, options.beta2, options.epsilon, options.weight_decay},
        arena_(arena),
        ranges_(decay_ranges(options, arena)),
        first_(arena.size()),
        second_(arena.size()) {}

  bool takes(GradientForm form) const override { return form == GradientForm::plain; }

  void update(std::size_t offset, std::span<const float> gradient, const OptimizerStep& step,
              GradientForm form) override {
    const std::size_t end = offset + gradient.size();
    TOPKNOT_CHECK(end <= arena_.size(), "a slice outside the arena");
    TOPKNOT_CHECK(takes(form), "adamw takes gradients without momentum and learning rate in them");
    const AdamwRates rates = adamw_rates(constants_, step.step, step.lr, step.gradient_scale);
    float* const weights = arena_.weights().data();
    for (const DecayRange& range : ranges_) {
      const std::size_t from = std::max(offset, range.begin), to = std::min(end, range.end);
#pragma omp parallel for schedule(static) if (to >= from + kParallelAdamw)
      for (std::size_t i = from; i < to; ++i)
        adamw_step(weights[i], gradient[i - offset], first_[i], second_[i], rates, range.decays);
    }
  }

  std::vector<std::span<float>> state() override {
    return {first_, second_};
  }

 private:
  const AdamwConstants constants_;
  ParameterArena& arena_;
  std::vector<DecayRange> ranges_;
  std::vector<float> first_, second_;  // moments
};

const bool adamw_registered =
    (optimizers().add("adamw", "AdamW: decoupled weight decay (PyTorch's semantics)",
                      [](const OptimizerOptions& options, ParameterArena& arena) {
                        return std::unique_ptr<Optimizer>(new AdamW(options, arena));
                      }),
     true);

}  // namespace
}  // namespace topknot
