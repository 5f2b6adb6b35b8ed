#pragma once
// A training step of one rank. The replica (train/replica.h) makes the forward and backward pass, a StepRule
// decides what the ranks exchange and how weights change, the device's runner (train/runner.h) carries it
// out. The trainer (train/trainer.cpp) says which step to make, with which rates.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nn/base/clock.h"
#include "train/checkpoint/checkpoint.h"
#include "train/plan/plan.h"
#include "train/recorder.h"
#include "train/replica.h"

namespace topknot {

// Decides what the ranks exchange and how weights change: averaged gradients in every step
// (train/gradient_step.cpp), or changes of the weights every few steps (train/local_steps.h).
class StepRule {
 public:
  virtual ~StepRule() = default;
  // The arena of the exchange: the weights that are the same on all ranks, laid out as the replica's.
  virtual ParameterArena& shared_weights() = 0;
  // From here on. `exchange`: of shared_weights(); both outlive the steps that are made.
  virtual void exchange_by(Exchange& exchange, Recorder& recorder) = 0;
  virtual void begin_run(std::int64_t /*total_steps*/) {}
  // Makes a step. What of `context` is used: see Exchange::begin_step().
  virtual StepReport make(const StepContext& context) = 0;

  // State of the optimizer that is the same on all ranks, and what this rank has of its own.
  virtual std::vector<std::span<float>> shared_state() = 0;
  virtual std::vector<std::span<float>> own_state() { return {}; }
  // Whether the ranks have agreed on the end of this step, counted from 0: shared_weights() are then those of all.
  virtual bool agrees_after(std::int64_t /*step*/) const { return true; }
  // Exchange::state() and load_state(), with what the rule adds to them.
  virtual std::vector<std::byte> exchange_state(const Exchange& exchange,
                                                std::vector<DeviceFloats>* later) const {
    return exchange.state(later);
  }
  virtual void load_exchange_state(Exchange& exchange, std::span<const std::byte> bytes) {
    exchange.load_state(bytes);
  }
  // Puts shared_weights() into the replica, for an evaluation. A second call puts the rank's own back.
  virtual void swap_weights() {}

  // After how many steps that were not reported the ranks report, if the runner may be `ahead` steps ahead
  // and `in_patience` steps take as long as a stop signal may wait. And how many of `made` are reported.
  virtual std::int64_t steps_per_report(std::int64_t ahead, std::int64_t /*in_patience*/) const {
    return ahead;
  }
  // A GPU works on the later half meanwhile.
  virtual std::size_t reported_of(std::size_t made) const { return (made + 1) / 2; }
};

std::unique_ptr<StepRule> make_gradient_step(const Config& config, Communicator& communicator, Runner& runner,
                                             Replica& replica);
// Chooses by exchange.every: local steps, or gradients in every step.
std::unique_ptr<StepRule> make_step_rule(const Config& config, Communicator& communicator, Runner& runner,
                                         Replica& replica, CollectiveQueue& queue);

class Step {
 public:
  // On the device of the configuration. Collective. UserError if that cannot be used or options contradict.
  Step(const RunInputs& inputs, Communicator& communicator);
  ~Step();

  const ParameterArena& arena() const { return replica_.arena(); }
  ParameterArena& shared_weights() const { return rule_->shared_weights(); }
  const ParameterStore& store() const { return replica_.store(); }
  const std::vector<Group>& groups() const { return exchange_->groups(); }
  const Loader& train_loader() const { return replica_.train_loader(); }
  std::string device() const { return runner_->traits().name; }
  // The configuration with what this run has measured: exchange.groups, exchange.collective.
  Config effective_config() const { return resolved_.effective(config_); }
  double flops() const { return replica_.flops(); }
  // The makespan by the run's profile; 0 if there is none.
  double modelled_makespan() const { return resolved_.modelled_makespan(groups()); }

  void begin_run(std::int64_t total_steps) {
    runner_->begin_run(total_steps);
    rule_->begin_run(total_steps);
  }
  // Loader::enter_epoch() in steps: the step of the epoch at which to start it.
  std::int64_t enter_epoch(std::int64_t epoch, const std::vector<Dealt>& dealt) {
    return replica_.enter_epoch(epoch, dealt);
  }
  // `first_step`: of the epoch, if a resumed run enters it.
  void start_epoch(std::int64_t epoch, std::int64_t first_step) { replica_.start_epoch(epoch, first_step); }
  // Waits for the next step's data or a stop signal, and counts that in the step's time. Not on a GPU.
  void await_batch() {
    const Stopwatch watch(awaited_s_);
    replica_.await_batch();
  }
  void make(const StepContext& context) {
    runner_->begin_step(context, replica_.begin_step(), std::exchange(awaited_s_, 0.0));
    recorder_.begin_step(context.step);
    runner_->end_step(rule_->make(context), replica_.loss());
  }
  // See Exchange: of an elastic run, which computes on a CPU. abandon() also puts statistics back.
  void when_agreement_fails(AgreementSource source) { exchange_->when_agreement_fails(std::move(source)); }
  const Agreement& last_agreement() const { return exchange_->last_agreement(); }
  void abandon() {
    if (exchange_->abandon()) replica_.restore_statistics_if_bad(nullptr);
  }
  void scale_memory(float factor) { exchange_->scale_memory(factor); }
  bool agrees_after(std::int64_t step) const { return rule_->agrees_after(step); }  // see StepRule
  // See StepRule; the same on all ranks.
  std::int64_t steps_per_report(std::int64_t in_patience) const {
    return rule_->steps_per_report(runner_->traits().steps_ahead, in_patience);
  }
  std::size_t reported_of(std::size_t made) const { return rule_->reported_of(made); }
  // The oldest `count` reports that were not asked for, in order; waits for these steps alone.
  std::vector<StepReport> reports(std::size_t count) { return runner_->reports(count); }
  // Between steps whose reports were asked for, without local steps and on a CPU: gradients go another way
  // from here on. What the method so far has not sent stays in the residual where both have one; where only
  // that one has, its last step must have sent all (density 1).
  void exchange_by(const ExchangeOptions& options);
  // Once the trainer has reported a step.
  void end_step(const StepRecord& record, MetricsWriter* metrics) {
    if (metrics) recorder_.end_step(record, *metrics);
  }

  // All of these are collective.
  void all_reduce(std::span<double> sums);
  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all);  // by rank
  // Evaluates the test set or, if the run has one, the held-out set. None if the hook ended it, on all alike.
  std::optional<Evaluation> evaluate(Split split, const EvaluationHook& hook);
  void check_parameters(const std::string& when);

  // After all reports were asked for. state() copies what this rank has, weights and optimizer on rank 0
  // only or if `shared_too`; it reuses the memory of `state`, which is complete once what it returns has been called: by any
  // thread, during further steps, before the next state(). A GPU's copy to the host waits until then; empty
  // if nothing does. load_state() takes both from there on every rank; throws UserError if it does not fit
  // the model or the method.
  std::function<void()> state(RunState& state, bool shared_too = false);
  void load_state(const RunState& state);

  std::string checksum() const;  // of the weights, 16 hexadecimal digits
  // Closes what the run writes.
  void finish() {
    recorder_.finish();
    runner_->finish();
  }

 private:
  const Config& config_;
  Communicator& communicator_;
  const std::unique_ptr<Runner> runner_;
  Replica replica_;
  CollectiveQueue queue_;
  ResolvedExchange resolved_;
  const std::unique_ptr<StepRule> rule_;
  std::unique_ptr<Exchange> exchange_;
  Recorder recorder_;
  double awaited_s_ = 0;  // in await_batch(), for the next step
};

}  // namespace topknot
