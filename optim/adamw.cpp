// AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2), as
// torch.optim.AdamW computes it. With t = 1, 2, ... the step and g the averaged gradient:
//
//   w = w - lr * weight_decay * w
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g^2
//   w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//
// t counts the steps of the run, skipped ones too: a skipped step leaves w, m and v alone and makes the
// corrections that much closer to 1 (PyTorch's loss scaler does not count it).

#include "nn/base/check.h"
#include "optim/optimizer.h"
#include "optim/rules.h"

namespace topknot {
namespace {

constexpr std::size_t kParallelAdamw = 1 << 14;  // elements

void adamw_update(const ArenaSlice& slice, float* first, float* second, const AdamwConstants& constants,
                  const StepState& state) {
  if (state.status && state.status->bad) return;
  const StepParameters& now = *state.parameters;
  const AdamwRates rates = adamw_rates(constants, now.step, now.lr, now.gradient_scale);
  for_decay_runs(slice, [&](std::size_t from, std::size_t to, bool decays) {
#pragma omp parallel for schedule(static) if (to >= from + kParallelAdamw)
    for (std::size_t i = from; i < to; ++i)
      adamw_step(slice.weights[i], slice.gradient[i], first[i], second[i], rates, decays);
  });
}

class AdamW final : public Optimizer {
 public:
  AdamW(const OptimizerOptions& options, ParameterArena& arena)
      : constants_{options.get<Given>(option::beta1).value_or(0.9),
                   options.get<Given>(option::beta2).value_or(0.999),
                   options.get<Given>(option::epsilon).value_or(1e-8), options.weight_decay},
        kernels_(*find_kernels<AdamwKernels>(arena.device().kind)),
        slices_(options, arena),
        first_(zeros_like(arena)),
        second_(zeros_like(arena)) {}

  static bool takes(Applied applied) { return applied == Applied::nothing; }

  void update(std::size_t offset, std::span<const float> gradient, const StepState& state,
              Applied applied) override {
    const ArenaSlice slice = slices_.slice(offset, gradient);
    TOPKNOT_CHECK(takes(applied), "adamw takes gradients without momentum and learning rate in them");
    kernels_.update(slice, first_.data() + offset, second_.data() + offset, constants_, state);
  }

  std::vector<std::span<float>> state() override { return {span_of(first_), span_of(second_)}; }

 private:
  using Given = std::optional<double>;
  const AdamwConstants constants_;
  const AdamwKernels& kernels_;
  ArenaSlices slices_;
  Tensor first_, second_;  // moments
};

const bool adamw_kernels = add_cpu_kernels<AdamwKernels>({adamw_update});
const bool adamw_registered =
    optimizers().add("adamw", "AdamW: decoupled weight decay (PyTorch's semantics)",
                     optimizer_type<AdamW, AdamwKernels>(), {option::beta1, option::beta2, option::epsilon});

}  // namespace
}  // namespace topknot
