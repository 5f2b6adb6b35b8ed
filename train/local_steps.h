#pragma once
// Local steps: a rank makes steps of its own between two exchanges, and what the ranks exchange is how far their weights
// have gone (DiLoCo: Douillard et al., arXiv 2311.08105). The model is one fragment, or exchange.fragments of them take
// turns, each once in exchange.every steps (Streaming DiLoCo, arXiv 2501.18512). With theta a fragment's weights after its
// last sync, the same bits on all ranks, and x those of this rank:
//
//   inner step   x <- optimizer(x, this rank's gradient), clipped by train.clip_global; nothing is sent
//                With exchange.ranks_per_host the ranks of a host make it together, by their gradients' average
//                (train/gradient_step.cpp), have one x, and send one Delta
//   sync         Delta = theta - x;  D = the average of Delta that the exchange makes, by any method
//                exchange.overlap_steps inner steps
//                theta <- outer optimizer(theta, D);  x <- alpha x + (1 - alpha) theta
//
// The outer optimizer is SGD as PyTorch writes it, of constant rate: b <- m b + D, theta <- theta - lr b, or with
// Nesterov's momentum theta - lr (D + m b). A rank's own optimizer keeps its state over a sync; its rates and its
// steps count inner steps. The last step of a run ends with a sync of every fragment.
//
// With H = exchange.every, F fragments and h = H / F, fragment f is sent after step (f + 1) h, counted from 1, and every H
// steps again.
//
// A step whose loss or gradient is not finite on a rank is left out by that rank alone, and reported with the others.
// A sync that some rank's Delta makes not finite is discarded by all: every rank goes back to theta, of that fragment.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "compress/state.h"
#include "dist/exchange/exchange.h"
#include "nn/core/device.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"
#include "nn/core/tensor.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "train/config/config.h"

namespace topknot {

class LocalSteps {
 public:
  // `model` has the first weights, and must outlive this. `alone`: inner_step() makes inner steps.
  LocalSteps(const Config& config, ParameterStore& model, int rank, bool alone = true);
  void begin_run(std::int64_t total_steps) { total_steps_ = total_steps; }

  // The arena that the exchange works on: a second one of the model's layout, with theta as its weights,
  // Delta as its gradients and the error feedback as its residuals.
  ParameterArena& arena() const { return arena_; }

  // The inner step, by the model's gradients. False if these or the loss are not finite: nothing has changed then.
  bool inner_step(const StepContext& context, float loss);
  // Whether a sync begins or ends after this inner step, counted from 0; exchange_after() makes it do so.
  bool exchanges_after(std::int64_t step) const {
    const std::int64_t made = step + 1;
    return made == total_steps_ || fragment_sent_after(made) >= 0 ||
           (sync_ && made == sync_->step + 1 + overlap_);
  }
  bool under_way() const { return sync_.has_value(); }
  // Collective. `exchange`: of arena(). Returns the syncs that ended, together; none: a report of nothing.
  StepReport exchange_after(Exchange& exchange, const StepContext& context);
  // For what looks at theta through the model: an evaluation. A second call puts the rank's own weights back.
  void swap_weights();

  // State other than theta: b, of all ranks; and of this rank x, its optimizer's buffers and, with overlap,
  // the Delta that is under way.
  std::vector<std::span<float>> outer_state() { return outer_optimizer_->state(); }
  std::vector<std::span<float>> inner_state();
  // The local steps' part of Exchange::state() and load_state(). A sync in flight is sent anew, so loading is
  // collective then. Called after the other state was loaded.
  std::vector<std::byte> exchange_state(const Exchange& exchange, std::vector<DeviceFloats>* later) const;
  void load_exchange_state(Exchange& exchange, std::span<const std::byte> bytes);

 private:
  struct Sync {
    std::int64_t step, fragment;
    double density;
    std::vector<float> weights;     // of the ranks
    std::vector<std::byte> before;  // the exchange's state
  };
  // -1: none.
  std::int64_t fragment_sent_after(std::int64_t made) const {
    const std::int64_t apart = every_ / fragments_;
    return made % apart == 0 ? (made / apart - 1) % fragments_ : -1;
  }
  void send(Exchange& exchange, const StepContext& context, std::int64_t fragment);
  void start(Exchange& exchange, const Sync& sync);
  StepReport receive(Exchange& exchange);

  const int rank_;
  const std::int64_t every_, fragments_, overlap_;
  std::int64_t total_steps_ = 0;
  const double outer_lr_, clip_norm_;
  const float alpha_;
  ParameterArena& model_;
  ParameterStore outer_;
  ParameterArena& arena_;
  const DeviceBackend& backend_;
  const std::unique_ptr<Optimizer> inner_;  // null: not alone
  const std::unique_ptr<Optimizer> outer_optimizer_;
  Clip clip_;
  std::optional<Sync> sync_;
  // In the device's memory: the inner step's StepParameters, and one float that is NaN if Delta is not finite.
  Tensor parameters_, found_;
  Tensor changes_;  // Delta as it was sent, which the exchange works in; with overlap
};

// The outer optimizer's options for make_optimizer().
OptimizerOptions outer_options(const Config::Outer& outer);

}  // namespace topknot
