// Steps by the sign of the averaged gradient, with decoupled weight decay, as DeMo takes them (Peng et al., arXiv
// 2411.19870):
//
//   w = (1 - lr * weight_decay) w - lr * sign(g),  sign(0) = 0
//
// Momentum is before the average (compress.name=demo), or nowhere.

#include "optim/optimizer.h"
#include "optim/rules.h"

namespace topknot {
namespace {

class Sign final : public Optimizer {
 public:
  Sign(const OptimizerOptions& options, ParameterArena& arena)
      : decay_(options.weight_decay), slices_(options, arena) {}

  void update(std::size_t offset, std::span<const float> gradient, const StepState& state, Applied) override {
    if (state.status && state.status->bad) return;
    const ArenaSlice slice = slices_.slice(offset, gradient);
    const float lr = static_cast<float>(state.parameters->lr);
    for_decay_runs(slice, [&](std::size_t from, std::size_t to, bool decays) {
      const float keep = decays ? static_cast<float>(1 - state.parameters->lr * decay_) : 1;
#pragma omp parallel for schedule(static) if (to - from >= kParallel)
      for (std::size_t i = from; i < to; ++i) {
        const float g = slice.gradient[i];
        const float sign = static_cast<float>(g > 0) - static_cast<float>(g < 0);
        slice.weights[i] = keep * slice.weights[i] - lr * sign;
      }
    });
  }

 private:
  static constexpr std::size_t kParallel = 1 << 16;
  const double decay_;
  const ArenaSlices slices_;
};

const bool sign_registered = optimizers().add(
    "sign", "steps by the sign of the averaged gradient, for compress.name=demo", {make_as<Optimizer, Sign>});

}  // namespace
}  // namespace topknot
