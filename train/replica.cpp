#include "train/replica.h"

#include <algorithm>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/core/pass_cost.h"
#include "train/checks.h"
#include "train/setup.h"

namespace topknot {

Replica::Replica(const RunInputs& inputs, Communicator& communicator, Runner& runner)
    : inputs_(inputs),
      config_(inputs.config),
      communicator_(communicator),
      runner_(runner),
      model_(build_model(config_, *inputs.data.train, runner.traits().device, !inputs.resume)),
      arena_(model_->store.arena()),
      backend_(backend(arena_.device())),
      loss_(Tensor::zeros({1}, Layout::plain, arena_.device())),
      statistics_(model_->store.statistics()) {
  std::int64_t floats = 0;
  for (const std::span<float> statistics : statistics_)
    floats += static_cast<std::int64_t>(statistics.size());
  if (floats > 0) kept_statistics_ = Tensor::empty({floats}, Layout::plain, arena_.device());
}

Replica::~Replica() = default;

ParameterStore& Replica::store() const {
  return model_->store;
}

void Replica::start_epoch(std::int64_t epoch, std::int64_t first_step) {
  if (first_step == 0) model_->store.reset_states();
  train_->start_epoch(epoch, first_step * parts_);
  batches_left_ = train_->loader().steps_per_epoch() - first_step * parts_;
}

int Replica::begin_step() {
  spin_control_.poll();
  step_parts_ = static_cast<int>(std::min<std::int64_t>(parts_, batches_left_));
  TOPKNOT_CHECK(step_parts_ > 0, "an epoch has fewer batches than its steps");
  batches_left_ -= step_parts_;
  return step_parts_;
}

void Replica::forward_and_backward(std::int64_t step, const GradientHook& hook) {
  using Phase = Runner::Phase;
  std::optional<PassCost> cost;
  if (step_parts_ == parts_ && !std::exchange(counted_, true) &&
      inputs_.data.train->task() != Task::transcription)
    cost.emplace();
  const bool stateless = train_->loader().random_windows();
  arena_.mark_gradients_unwritten();
  save_statistics();
  backend_.fill_zero(loss(), 1);
  for (int part = 0; part < step_parts_; ++part) {
    const BatchView* batch = nullptr;
    Variable loss;
    const float share = train_loader().share(part, step_parts_);
    runner_.in_phase(Phase::data, [&] { batch = &train_->of_step(part); });
    runner_.in_phase(Phase::forward, [&] {
      if (stateless) model_->store.reset_states();  // the text before a window is not known
      loss = model_->loss(*batch, forward_context(step, part, *batch), config_.train.label_smoothing);
    });
    backend_.add_scaled(this->loss(), loss.value().data(), 1, share);
    runner_.in_phase(Phase::backward,
                     [&] { backward(loss, part + 1 == step_parts_ ? hook : GradientHook{}, share); });
  }
  if (cost) flops_ = cost->flops();
  if (step == 0) warn_of_unused_parameters();
}

ForwardContext Replica::forward_context(std::int64_t step, int part, const BatchView& batch) const {
  ForwardContext context;
  context.seed = config_.seed;
  context.rank = static_cast<std::uint32_t>(communicator_.rank());
  context.step = static_cast<std::uint32_t>(step * parts_ + part);
  if (const std::uint32_t* steps = runner_.traits().gpu_steps) context.gpu_step = steps + part;
  context.frames = batch.frames;
  return context;
}

void Replica::warn_of_unused_parameters() {
  if (communicator_.rank() != 0) return;
  for (const Parameter* parameter : arena_.zero_unwritten_gradients())
    log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
}

void Replica::save_statistics() {
  float* to = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    backend_.copy(statistics.data(), to, statistics.size());
    to += statistics.size();
  }
}

void Replica::restore_statistics_if_bad(const StepStatus* status) {
  const float* from = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    if (status)
      backend_.restore_if_bad(status, from, statistics.data(), statistics.size());
    else
      backend_.copy(from, statistics.data(), statistics.size());
    from += statistics.size();
  }
}

void Replica::bring_statistics_together(CollectiveQueue& queue) {
  store().statistics_to_host();
  synchronize_statistics(store(), config_.train.bn_stats, queue, communicator_);
  store().statistics_to_device();
}

std::optional<EvaluationSums> Replica::evaluate(Split split, const EvaluationHook& hook) {
  std::vector<float> training;
  copy_statistics(store(), training);
  store().reset_states();
  bool ended = false;
  const std::unique_ptr<Batches> held_out =
      split == Split::test ? nullptr : runner_.make_batches(*inputs_.data.held_out, *model_->module, false);
  EvaluationSums sums;
  const auto restore = [&] {
    restore_statistics(training, store());
    store().statistics_to_device();
  };
  try {
    runner_.in_phase(Runner::Phase::evaluate, [&] {
      sums = evaluation_sums(*model_, held_out ? *held_out : *test_,
                             [&](std::int64_t done, std::int64_t batches) {
                               spin_control_.poll();
                               ended = !hook(done, batches);
                               return !ended;
                             });
    });
  } catch (const CollectiveError&) {
    restore();  // an elastic run goes on
    throw;
  }
  restore();
  return ended ? std::nullopt : std::optional(sums);
}

}  // namespace topknot
