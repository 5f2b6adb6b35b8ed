#pragma once
// Local steps: a rank makes exchange.every steps of its own between two exchanges, and what the ranks exchange is how
// far their weights have gone (DiLoCo: Douillard et al., arXiv 2311.08105). With theta the weights after the last
// sync, the same bits on all ranks, and x those of this rank:
//
//   inner step   x <- optimizer(x, this rank's gradient), clipped by train.clip_global; nothing is sent
//   sync         Delta = theta - x;  D = the average of Delta that the exchange makes, by any method
//                theta <- outer optimizer(theta, D);  x <- theta
//
// The outer optimizer is SGD as PyTorch writes it, of constant rate: b <- m b + D, theta <- theta - lr b, or with
// Nesterov's momentum theta - lr (D + m b). A rank's own optimizer keeps its state over a sync; its rates and its
// steps count inner steps. The last step of a run ends with a sync whatever exchange.every is.
//
// A step whose loss or gradient is not finite on a rank is left out by that rank alone, and reported with the others.
// A sync that some rank's Delta makes not finite is discarded by all: every rank goes back to theta.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dist/exchange/exchange.h"
#include "nn/core/device.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "train/config/config.h"

namespace topknot {

class LocalSteps {
 public:
  // Of a model in host memory whose weights are those that all ranks start from. The model must outlive this.
  LocalSteps(const Config& config, ParameterStore& model, int rank);
  void begin_run(std::int64_t total_steps) { total_steps_ = total_steps; }

  // What the exchange works on: a second arena of the model's layout, with theta as its weights, Delta as its gradients
  // and the error feedback as its residuals.
  ParameterArena& arena() const { return arena_; }
  bool ends_round(std::int64_t step) const { return (step + 1) % every_ == 0 || step + 1 == total_steps_; }

  // The inner step, by the model's gradients. False if these or the loss are not finite: nothing has changed then.
  bool inner_step(const StepContext& context, float loss);
  // The sync after an inner step for which ends_round() holds. Collective. `exchange`: of arena().
  StepReport sync(Exchange& exchange, const StepContext& context);
  // For what looks at theta through the model: an evaluation. A second call puts the rank's own weights back.
  void swap_weights();

  // State beside theta and what the exchange has: b, of all ranks; and of this rank x and its optimizer's buffers.
  std::vector<std::span<float>> outer_state() { return outer_optimizer_->state(); }
  std::vector<std::span<float>> inner_state();

 private:
  const int rank_;
  const std::int64_t every_;
  std::int64_t total_steps_ = 0;
  const double outer_lr_, clip_norm_;
  ParameterArena& model_;
  ParameterStore outer_;
  ParameterArena& arena_;
  const DeviceBackend& backend_;
  const std::unique_ptr<Optimizer> inner_, outer_optimizer_;
  Clip clip_;
};

// Of the outer optimizer, as make_optimizer() takes them.
OptimizerOptions outer_options(const Config::Outer& outer);

}  // namespace topknot
