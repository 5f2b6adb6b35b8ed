#pragma once
// An optimizer turns averaged gradients into new weights, slice by slice of the parameter arena. It is
// elementwise, so its result does not depend on how the arena is cut into slices nor on the number of
// threads.

#include <cstddef>
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
  double weight_decay = 0.0;  // >= 0; added to the averaged gradient as weight_decay * w
  bool decay_1d = false;      // whether 1-D parameters (biases, batch-norm scales) decay too
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates the weights of arena elements [offset, offset + gradient.size()) with this averaged gradient,
  // times `gradient_scale` (a clip factor; 1 changes no bit). Each element once a step, in any order of
  // slices. Throws Error where the slice lies outside the arena.
  // `form` says what the gradient has in it already; has_lr does not go with momentum.
  virtual void update(std::size_t offset, std::span<const float> gradient, double lr,
                      double gradient_scale = 1.0, GradientForm form = GradientForm::plain) = 0;

  // State to save and restore, in a fixed order, each buffer of the arena's shape; empty where there is none.
  virtual std::vector<std::span<float>> state() { return {}; }
};

using OptimizerFactory = std::unique_ptr<Optimizer> (*)(const OptimizerOptions& options,
                                                        ParameterArena& arena);
Registry<OptimizerFactory>& optimizers();

// Throws UserError, naming the key, for an unknown name or a value out of range.
void check_optimizer(const OptimizerOptions& options);

// Throws as check_optimizer(). The arena must outlive the
// result.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, ParameterArena& arena);

}  // namespace topknot
