#pragma once
// A rank's replica: its weights, statistics, optimizer, exchange and data, built by the configuration, and
// the training step on them, written once for all devices: forward, backward with the exchange in its hooks,
// clipping, agreement, update. The trainer (train/trainer.cpp) says which step to make, with which rates; the
// device's runner (train/runner.h) carries it out.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "nn/core/autograd.h"
#include "nn/core/device.h"
#include "nn/core/tensor.h"
#include "nn/core/threads.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "train/checkpoint/checkpoint.h"
#include "train/evaluate.h"
#include "train/local_steps.h"
#include "train/plan/exchange_plan.h"
#include "train/recorder.h"
#include "train/runner.h"

namespace topknot {

class Step {
 public:
  // On the device of the configuration. Collective. Throws UserError if that cannot be used, or options
  // contradict each other.
  Step(const RunInputs& inputs, Communicator& communicator);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  const ParameterArena& arena() const { return arena_; }
  // Of local steps: whether collectives would wait for a sync that was sent.
  bool sync_under_way() const { return local_ && local_->under_way(); }
  // The weights that are the same on all ranks, of one layout with arena(): its own, or those after the last sync.
  ParameterArena& shared_weights() const { return local_ ? local_->arena() : arena_; }
  const ParameterStore& store() const { return model_->store; }
  const std::vector<Group>& groups() const { return exchange_->groups(); }
  const Loader& train_loader() const { return train_->loader(); }
  std::string device() const { return runner_->name(); }
  // The configuration with what this run has measured: exchange.groups, exchange.collective.
  Config effective_config() const { return resolved_.effective(config_); }
  // Of a step of this rank, PassCost::flops() in the first whole step of this start; 0 before it, and if steps
  // differ (recordings of any length).
  double flops() const { return flops_; }
  // By the run's profile; 0 if there is none.
  double modelled_makespan() const { return resolved_.modelled_makespan(groups()); }

  // `first_step`: of the epoch, if a resumed run enters it.
  void start_epoch(std::int64_t epoch, std::int64_t first_step);
  // Waits until the next step's data are there, or until a stop signal, and counts the time in that step's.
  // On a GPU it returns at once.
  void await_batch();
  // Makes a step. What of `context` is used: see Exchange::begin_step().
  void make(const StepContext& context);
  // Steps that may be made whose reports were not asked for; the same on all ranks.
  std::int64_t steps_ahead() const { return runner_->steps_ahead(); }
  // Of the oldest `count` steps whose reports were not asked for, in order; waits for these steps alone.
  std::vector<StepReport> reports(std::size_t count) { return runner_->reports(count); }
  // Between steps whose reports were asked for, without local steps and on a CPU: gradients go another way from
  // here on. What the method so far has not sent stays owed where both carry it; where only that one does, its
  // last step must have sent all (density 1).
  void exchange_by(const ExchangeOptions& options);
  // Once the trainer has reported a step.
  void end_step(const StepRecord& record, MetricsWriter* metrics);

  // All of these are collective.
  void all_reduce(std::span<double> sums);
  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all);  // by rank
  // Of the test set or, if the run has one, the held-out set. None if the hook ended it, which it must do on
  // all ranks alike.
  std::optional<Evaluation> evaluate(Split split, const EvaluationHook& hook);
  void check_parameters(const std::string& when);

  // Where all reports were asked for. state() copies what this rank has, weights and optimizer on rank 0
  // only; it reuses the memory of `state`, which is complete once what it returns has been called: by any
  // thread, beside further steps, before the next state(). A GPU's copy to the host waits until then; empty
  // if nothing does. load_state() takes both from there on every rank; throws UserError if it does not fit
  // the model or the method.
  std::function<void()> state(RunState& state);
  void load_state(const RunState& state);

  std::string checksum() const;  // of the weights, 16 hexadecimal digits
  void finish();                 // closes what the run writes

 private:
  using Phase = Runner::Phase;

  void compute(std::int64_t step);
  void apply();
  StepReport make_local(const StepContext& context);
  void forward_and_backward(std::int64_t step, const GradientHook& hook);
  ForwardContext forward_context(std::int64_t step, int part, const BatchView& batch) const;
  void gradient_final(Parameter& parameter);  // in the backward pass's hook
  void clip_and_send_all();
  void clip_tensors();
  void warn_of_much_clipping();
  void warn_of_unused_parameters();  // also zeroes their gradients, as end_backward() would
  void set_gradient_scale();
  void save_statistics();
  void restore_statistics_if_bad(const StepStatus* status);
  void bring_statistics_together();

  const RunInputs& inputs_;
  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  const int parts_;                // micro-batches per step, fewer in an epoch's last one
  int step_parts_ = 0;             // of the step under way
  std::int64_t batches_left_ = 0;  // of the epoch
  // The greatest norm of this rank's gradient before compression, 0: no clipping; of the whole gradient, or
  // of each tensor's.
  const double clip_norm_;
  const bool clip_model_;
  const std::unique_ptr<Runner> runner_;
  const std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  ResolvedExchange resolved_;
  const std::unique_ptr<LocalSteps> local_;     // null: gradients are exchanged, in every step
  const std::unique_ptr<Optimizer> optimizer_;  // of averaged gradients; null with local steps
  Clip clip_;
  const DeviceBackend& backend_;
  Tensor loss_;  // this rank's of the step: the mean over its micro-batches
  // Batch norm's and recurrent states, which the forward pass moves; and as they were before this step,
  // undefined if there are none.
  const std::vector<std::span<float>> statistics_;
  Tensor kept_statistics_;
  std::unique_ptr<Exchange> exchange_;
  const std::unique_ptr<Batches> train_, test_;
  const GradientHook hook_;  // gradient_final()
  Recorder recorder_;
  int clips_ = 0,
      cuts_ = 0;  // gradients of this start that warn_of_much_clipping() has looked at, and that were cut
  bool counted_ = false;
  double flops_ = 0;
  double awaited_s_ = 0;  // in await_batch(), for the next step
  SpinControl spin_control_;
};

}  // namespace topknot
