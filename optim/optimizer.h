#pragma once
// An optimizer turns averaged gradients into new weights, slice by slice of the parameter arena. It is
// elementwise, so its result does not depend on how the arena is cut into slices nor on the number of
// threads. An optimizer is one file that registers itself in optimizers(); one with kernels for a GPU registers these in
// device_optimizers() (optim/cuda/device_optimizer.h).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/core/base/registry.h"
#include "nn/core/gradient_form.h"
#include "nn/core/parameter.h"

namespace topknot {

// The keys of section `optimizer`.
struct OptimizerOptions {
  std::string name = "sgd";
  double lr = 0.1;            // base learning rate, > 0; the schedule starts from it
  double momentum = 0.0;      // in [0, 1)
  bool nesterov = false;      // needs momentum
  double weight_decay = 0.0;  // >= 0; of w, added to the averaged gradient (sgd) or taken from w (adamw)
  bool decay_1d = false;      // whether 1-D parameters (biases, batch-norm scales) decay too
  double beta1 = 0.9, beta2 = 0.999;  // adamw: in [0, 1)
  double epsilon = 1e-8;              // adamw: > 0
};

// What an update knows of its step, the same on all ranks.
struct OptimizerStep {
  std::int64_t step = 0;  // 0-based; skipped steps count
  double lr = 0.1;
  double gradient_scale = 1.0;  // a clip factor; 1 changes no bit
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates the weights of arena elements [offset, offset + gradient.size()) with this averaged gradient, times
  // step.gradient_scale. Called once per element and step, in any order of slices. `form` says what the gradient has in
  // it already. Throws Error where the slice lies outside the arena, or for a form that does not go with the update rule
  // (has_lr with momentum).
  virtual void update(std::size_t offset, std::span<const float> gradient, const OptimizerStep& step,
                      GradientForm form = GradientForm::plain) = 0;

  // Whether update() accepts gradients of this form.
  virtual bool takes(GradientForm) const { return true; }

  // State to save and restore, in a fixed order, each buffer of the arena's shape; empty where there is none.
  virtual std::vector<std::span<float>> state() { return {}; }
};

using OptimizerFactory = std::unique_ptr<Optimizer> (*)(const OptimizerOptions& options,
                                                        ParameterArena& arena);
Registry<OptimizerFactory>& optimizers();

// A run of arena elements that weight decay is for, or is not for.
struct DecayRange {
  std::size_t begin, end;
  bool decays;
};
// Ascending, covering the arena; neighbours differ in `decays`. 1-D parameters do not decay unless options.decay_1d.
std::vector<DecayRange> decay_ranges(const OptimizerOptions& options, const ParameterArena& arena);

// Throws UserError, naming the key, for an unknown name or a value out of range.
void check_optimizer(const OptimizerOptions& options);

// Throws as check_optimizer(). The arena is in host memory and must outlive the result.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, ParameterArena& arena);

}  // namespace topknot
