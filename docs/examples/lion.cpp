// An optimizer in one file: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
// algorithm 2). With g the averaged gradient:
//
//   w = w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
//   m = beta2 * m + (1 - beta2) * g
#include "nn/base/check.h"
#include "optim/optimizer.h"

namespace topknot {
namespace {

class Lion final : public Optimizer {
 public:
  Lion(const OptimizerOptions& options, ParameterArena& arena)
      : options_(options), slices_(options, arena), mean_(arena.size()) {}

  // A run whose gradients have something applied already is refused before its first step.
  static bool takes(Applied applied) { return applied == Applied::nothing; }

  void update(std::size_t offset, std::span<const float> gradient, const StepState& state,
              Applied applied) override {
    const ArenaSlice slice = slices_.slice(offset, gradient);
    TOPKNOT_CHECK(takes(applied), "lion takes plain gradients");
    const auto rate = static_cast<float>(state.parameters->lr),
               scale = static_cast<float>(state.parameters->gradient_scale);
    for_decay_runs(slice, [&](std::size_t begin, std::size_t end, bool decays) {
      const auto decay = static_cast<float>(decays ? options_.weight_decay : 0.0);
      for (std::size_t i = begin; i < end; ++i) {
        float &w = slice.weights[i], &m = mean_[offset + i];
        const float g = slice.gradient[i] * scale, u = kBeta1 * m + (1 - kBeta1) * g;
        w = w - rate * (static_cast<float>((u > 0) - (u < 0)) + decay * w);
        m = kBeta2 * m + (1 - kBeta2) * g;
      }
    });
  }

  // Saved with checkpoints.
  std::vector<std::span<float>> state() override { return {mean_}; }

 private:
  static constexpr float kBeta1 = 0.9f, kBeta2 = 0.99f;
  OptimizerOptions options_;
  ArenaSlices slices_;
  std::vector<float> mean_;  // of the gradient, of the arena's shape
};

std::unique_ptr<Optimizer> make_lion(const OptimizerOptions& options, ParameterArena& arena) {
  return std::make_unique<Lion>(options, arena);
}

const bool lion_registered = optimizers().add("lion", "Lion: the worked example of docs/extending.md",
                                              {.make = make_lion, .takes = Lion::takes});

}  // namespace
}  // namespace topknot
