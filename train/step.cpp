#include "train/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/core/autograd.h"
#include "nn/core/pass_cost.h"
#include "nn/core/step.h"
#include "train/checks.h"
#include "train/setup.h"

namespace topknot {

namespace {

std::unique_ptr<Runner> make_runner(const RunInputs& inputs, Communicator& communicator) {
  return parse_device(inputs.config.train.device).kind == DeviceKind::cuda
             ? make_cuda_runner(inputs, communicator)
             : make_cpu_runner(inputs, communicator);
}

// The greatest norm of a rank's gradient before compression; 0: no clipping. compress.clip is thr_G of Lin et
// al., "Deep Gradient Compression", section 3.3, which clips gradients that are divided by N already at
// N^-1/2 thr_G; here they are means, hence N^1/2.
double local_clip_norm(const Config& config, int ranks) {
  return config.compress.clip > 0 ? config.compress.clip * std::sqrt(ranks) : config.train.clip_local;
}

std::vector<std::span<float>> gradients_of(std::span<Parameter* const> parameters) {
  std::vector<std::span<float>> gradients;
  for (const Parameter* p : parameters) gradients.emplace_back(p->gradient(), p->numel());
  return gradients;
}

}  // namespace

Step::Step(const RunInputs& inputs, Communicator& communicator)
    : inputs_(inputs),
      config_(inputs.config),
      communicator_(communicator),
      root_(communicator.rank() == 0),
      parts_(config_.train.accumulate),
      clip_norm_(local_clip_norm(config_, communicator.size())),
      clip_model_(clip_norm_ > 0 && config_.train.clip_local_scope == "model"),
      runner_(make_runner(inputs, communicator)),
      model_(build_model(config_, *inputs.data.train, runner_->device(), !inputs.resume)),
      arena_(model_->store.arena()),
      queue_(communicator),
      resolved_(settle_exchange(inputs, arena_, queue_, communicator)),
      local_(makes_local_steps(config_)
                 ? std::make_unique<LocalSteps>(config_, model_->store, communicator.rank())
                 : nullptr),
      optimizer_(local_ ? nullptr : make_optimizer(config_.optimizer, arena_)),
      clip_(arena_.device(), arena_.size()),
      backend_(backend(arena_.device())),
      loss_(Tensor::zeros({1}, Layout::plain, arena_.device())),
      statistics_(model_->store.statistics()),
      exchange_(runner_->make_exchange(shared_weights(), queue_, resolved_.options)),
      train_(runner_->make_batches(*inputs.data.train, *model_->module, true)),
      test_(runner_->make_batches(*inputs.data.test, *model_->module, false)),
      hook_([this](Parameter& parameter) { gradient_final(parameter); }),
      recorder_(config_, inputs.folder, arena_, exchange_.get(), root_, inputs.resume) {
  std::int64_t floats = 0;
  for (const std::span<float> statistics : statistics_)
    floats += static_cast<std::int64_t>(statistics.size());
  if (floats > 0) kept_statistics_ = Tensor::empty({floats}, Layout::plain, arena_.device());
  const std::int64_t total_steps = plan_steps(config_, train_->loader()).total_steps;
  clip_tensors();
  runner_->begin_run(total_steps);
  if (local_) local_->begin_run(total_steps);
  if (arena_.device().kind != DeviceKind::cpu && root_ &&
      (resolved_.choice.planned || resolved_.choice.chosen))
    log_warning("exchange: the plan is made from this host's CPU times, and the run computes on a GPU");
}

Step::~Step() {
  runner_->release();
}

void Step::exchange_by(const ExchangeOptions& options) {
  TOPKNOT_CHECK(!local_ && arena_.device().kind == DeviceKind::cpu, "another exchange of gradients on a CPU");
  resolved_ = {options, {}};
  exchange_.reset();
  exchange_ = runner_->make_exchange(arena_, queue_, options);
  clip_tensors();
}

// One by one, to clip_norm_, those of a group at a time.
void Step::clip_tensors() {
  if (clip_norm_ > 0 && !clip_model_)
    exchange_->when_complete(
        [this](const Group& group) { clip_.clip_each(gradients_of(group.parameters), clip_norm_); });
}

void Step::start_epoch(std::int64_t epoch, std::int64_t first_step) {
  if (first_step == 0) model_->store.reset_states();
  train_->start_epoch(epoch, first_step * parts_);
  batches_left_ = train_->loader().steps_per_epoch() - first_step * parts_;
}

void Step::await_batch() {
  const Stopwatch watch(awaited_s_);
  train_->await();
}

void Step::end_step(const StepRecord& record, MetricsWriter* metrics) {
  runner_->reported();
  if (metrics) recorder_.end_step(record, *metrics);
}

void Step::finish() {
  recorder_.finish();
  runner_->finish();
}

void Step::make(const StepContext& context) {
  spin_control_.poll();
  step_parts_ = static_cast<int>(std::min<std::int64_t>(parts_, batches_left_));
  TOPKNOT_CHECK(step_parts_ > 0, "an epoch has fewer batches than its steps");
  batches_left_ -= step_parts_;
  runner_->begin_step(context, step_parts_, std::exchange(awaited_s_, 0.0));
  recorder_.begin_step(context.step);
  if (local_) return runner_->end_step(make_local(context), loss_.data());
  exchange_->begin_step(context);
  runner_->run(
      {[&] { compute(context.step); }, [&] { exchange_->communicate(); }, [&] { apply(); }, loss_.data()});
  runner_->end_step(exchange_->end_step(), loss_.data());
}

void Step::compute(std::int64_t step) {
  forward_and_backward(step, clip_model_ ? GradientHook{} : hook_);
  if (clip_model_) runner_->in_phase(Phase::clip, [&] { clip_and_send_all(); });
  exchange_->end_backward(loss_.data());
}

// `hook`: of the last micro-batch's backward pass, where gradients become final.
void Step::forward_and_backward(std::int64_t step, const GradientHook& hook) {
  std::optional<PassCost> cost;
  if (step_parts_ == parts_ && !std::exchange(counted_, true) &&
      inputs_.data.train->task() != Task::transcription)
    cost.emplace();
  const bool stateless = train_->loader().random_windows();
  arena_.mark_gradients_unwritten();
  save_statistics();
  backend_.fill_zero(loss_.data(), 1);
  const float share = 1.0f / static_cast<float>(step_parts_);  // of a micro-batch in the step's mean
  for (int part = 0; part < step_parts_; ++part) {
    const BatchView* batch = nullptr;
    Variable loss;
    runner_->in_phase(Phase::data, [&] { batch = &train_->of_step(part); });
    runner_->in_phase(Phase::forward, [&] {
      if (stateless) model_->store.reset_states();  // the text before a window is not known
      loss = model_->loss(*batch, forward_context(step, part, *batch), config_.train.label_smoothing);
    });
    backend_.add_scaled(loss_.data(), loss.value().data(), 1, share);
    runner_->in_phase(Phase::backward,
                      [&] { backward(loss, part + 1 == step_parts_ ? hook : GradientHook{}, share); });
  }
  if (cost) flops_ = cost->flops();
  if (step == 0) warn_of_unused_parameters();
}

void Step::apply() {
  exchange_->decode_and_commit();
  if (exchange_->committed())
    runner_->in_phase(Phase::update, [&] {
      if (config_.train.clip_global > 0) set_gradient_scale();
      for (const Group& group : groups())
        optimizer_->update(group.begin, exchange_->averaged(group), exchange_->step_state(),
                           exchange_->applied(group));
    });
  restore_statistics_if_bad(exchange_->step_state().status);
}

// A step of this rank alone, and what of a sync begins or ends behind it. What this rank leaves out is bad here,
// whatever the others found.
StepReport Step::make_local(const StepContext& context) {
  forward_and_backward(context.step, {});
  arena_.zero_unwritten_gradients();
  for (const Parameter* parameter : arena_.parameters()) recorder_.take(*parameter);
  bool left_out = false;
  runner_->in_phase(Phase::update, [&] {
    left_out = !local_->inner_step(context, value_on(backend_, static_cast<const float*>(loss_.data())));
  });
  if (left_out) restore_statistics_if_bad(nullptr);
  StepReport report;
  exchange_->clear_spans();
  if (local_->exchanges_after(context.step)) {
    report = local_->exchange_after(*exchange_, context);
    // Not behind what was only sent: it would wait for it.
    if (!local_->under_way()) bring_statistics_together();
  }
  if (left_out && report.committed()) {
    report.status.bad = 1, report.status.bad_rank = communicator_.rank();
    if (arena_.device().kind == DeviceKind::cpu) report.bad_parameter = first_bad_parameter(arena_);
  }
  return report;
}

void Step::gradient_final(Parameter& parameter) {
  runner_->in_phase(Phase::hook, [&] {
    recorder_.take(parameter);
    exchange_->ready(parameter);
  });
}

void Step::clip_and_send_all() {
  arena_.zero_unwritten_gradients();
  for (const Parameter* parameter : arena_.parameters()) recorder_.take(*parameter);
  const std::vector<std::span<float>> gradients = gradients_of(arena_.parameters());
  clip_.sum_of_squares(gradients);
  clip_.scale(gradients, clip_norm_);
  warn_of_much_clipping();
  for (Parameter* parameter : arena_.parameters()) exchange_->ready(*parameter);
}

// If clipping cuts nearly every gradient, only its direction is left, which costs accuracy: dgc on CIFAR-10
// with compress.clip=0.25 ended twelve points below dgc without. On a CPU, where the norm is known at once.
void Step::warn_of_much_clipping() {
  constexpr int kWatched = 100, kMany = 90;
  if (arena_.device().kind != DeviceKind::cpu) return;
  cuts_ += clip_factor(std::sqrt(*clip_.sum()), clip_norm_) < 1;
  if (++clips_ != kWatched || cuts_ < kMany || !root_) return;
  log_warning(
      fmt::format("{}: {} of the first {} gradients were longer and were cut, so that little but their "
                  "direction counts; raise it or leave it out",
                  config_.compress.clip > 0 ? "compress.clip" : "train.clip_local", cuts_, kWatched));
}

void Step::warn_of_unused_parameters() {
  if (!root_) return;
  for (const Parameter* parameter : arena_.zero_unwritten_gradients())
    log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
}

// train.clip_global, after averaging.
void Step::set_gradient_scale() {
  std::vector<std::span<float>> averages;
  for (const Group& group : groups()) averages.push_back(exchange_->averaged(group));
  clip_.sum_of_squares(averages);
  clip_.set_gradient_scale(config_.train.clip_global, exchange_->step_state().parameters);
}

void Step::save_statistics() {
  float* to = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    backend_.copy(statistics.data(), to, statistics.size());
    to += statistics.size();
  }
}

// `status`: null if the host knows it.
void Step::restore_statistics_if_bad(const StepStatus* status) {
  const float* from = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    if (status)
      backend_.restore_if_bad(status, from, statistics.data(), statistics.size());
    else
      backend_.copy(from, statistics.data(), statistics.size());
    from += statistics.size();
  }
}

void Step::bring_statistics_together() {
  ParameterStore& store = model_->store;
  store.statistics_to_host();
  synchronize_statistics(store, config_.train.bn_stats, queue_, communicator_);
  store.statistics_to_device();
}

ForwardContext Step::forward_context(std::int64_t step, int part, const BatchView& batch) const {
  ForwardContext context;
  context.seed = config_.seed;
  context.rank = static_cast<std::uint32_t>(communicator_.rank());
  context.step = static_cast<std::uint32_t>(step * parts_ + part);
  if (const std::uint32_t* steps = runner_->gpu_steps()) context.gpu_step = steps + part;
  context.frames = batch.frames;
  return context;
}

void Step::all_reduce(std::span<double> sums) {
  runner_->in_phase(Phase::metrics, [&] { queue_.run([&](Communicator& c) { c.all_reduce(sums); }); });
}

void Step::all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) {
  runner_->in_phase(Phase::metrics, [&] { queue_.run([&](Communicator& c) { c.all_gather(mine, all); }); });
}

// An evaluation begins from recurrent states of zeros, and training goes on from its own.
std::optional<Evaluation> Step::evaluate(Split split, const EvaluationHook& hook) {
  ParameterStore& store = model_->store;
  bring_statistics_together();
  std::vector<float> training;
  copy_statistics(store, training);
  store.reset_states();
  if (local_) local_->swap_weights();  // those that all ranks share
  bool ended = false;
  const std::unique_ptr<Batches> held_out =
      split == Split::test ? nullptr : runner_->make_batches(*inputs_.data.held_out, *model_->module, false);
  EvaluationSums sums;
  runner_->in_phase(Phase::evaluate, [&] {
    sums =
        evaluation_sums(*model_, held_out ? *held_out : *test_, [&](std::int64_t done, std::int64_t batches) {
          spin_control_.poll();
          ended = !hook(done, batches);
          return !ended;
        });
  });
  if (local_) local_->swap_weights();
  restore_statistics(training, store);
  store.statistics_to_device();
  if (ended) return std::nullopt;
  queue_.run([&](Communicator& c) { c.all_reduce(sums.values()); });
  return sums.mean();
}

void Step::check_parameters(const std::string& when) {
  check_same_parameters(shared_weights(), queue_, communicator_, when);
}

std::function<void()> Step::state(RunState& state) {
  std::vector<Runner::HostCopy> copies;
  const auto copy = [&](std::span<const float> from, void* to) {
    if (!from.empty()) copies.push_back({from, to});
  };
  const auto copy_all = [&](const std::vector<std::span<float>>& from, std::vector<std::vector<float>>& to) {
    to.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      to[i].resize(from[i].size());
      copy(from[i], to[i].data());
    }
  };
  if (root_) {
    state.model.weights.resize(arena_.all_weights().size());
    copy(shared_weights().all_weights(), state.model.weights.data());
    copy_all(local_ ? local_->outer_state() : optimizer_->state(), state.optimizer);
  }
  if (local_) copy_all(local_->inner_state(), state.inner);
  model_->store.statistics_to_host();
  copy_statistics(model_->store, state.model.statistics);
  std::vector<DeviceFloats> later;
  // Before the residuals, which it may write to the arena.
  state.exchange = local_ ? local_->exchange_state(*exchange_, &later) : exchange_->state(&later);
  for (const DeviceFloats& floats : later) copy(floats.values, state.exchange.data() + floats.offset);
  const bool has_residual = resolved_.options.compressing();
  state.residual.resize(has_residual ? arena_.size() : 0);
  if (has_residual)
    for (const Group& group : groups())
      copy(shared_weights().residual(group.begin, group.end), state.residual.data() + group.begin);
  return runner_->copy_to_host(copies);
}

void Step::load_state(const RunState& state) {
  const auto copy = [&](const std::vector<float>& from, std::size_t offset, std::span<float> to) {
    if (from.size() < offset + to.size()) throw UserError("the checkpoint is of another model");
    if (!to.empty()) backend_.to_device(to.data(), from.data() + offset, to.size());
  };
  const auto copy_all = [&](const std::vector<std::vector<float>>& from,
                            const std::vector<std::span<float>>& to) {
    if (from.size() != to.size()) throw UserError("the checkpoint is of another optimizer");
    for (std::size_t i = 0; i < to.size(); ++i) copy(from[i], 0, to[i]);
  };
  copy(state.model.weights, 0, arena_.all_weights());
  if (local_) {
    copy(state.model.weights, 0, local_->arena().all_weights());
    copy_all(state.inner, local_->inner_state());
  }
  copy_all(state.optimizer, local_ ? local_->outer_state() : optimizer_->state());
  restore_statistics(state.model.statistics, model_->store);
  model_->store.statistics_to_device();
  if (!state.residual.empty())
    for (const Group& group : groups())
      copy(state.residual, group.begin, shared_weights().residual(group.begin, group.end));
  if (state.exchange.empty()) return;
  if (local_)
    local_->load_exchange_state(*exchange_, state.exchange);
  else
    exchange_->load_state(state.exchange);
}

std::string Step::checksum() const {
  return checksum_hex(shared_weights().host_weights());
}

}  // namespace topknot
