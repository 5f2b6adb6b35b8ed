#include "train/step_engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/base/log.h"
#include "nn/base/stopwatch.h"
#include "nn/core/step.h"
#include "train/checksum.h"

namespace topknot {

StepEngine::StepEngine(const RunInputs& inputs, Communicator& communicator, Device device)
    : config_(inputs.config),
      communicator_(communicator),
      root_(communicator.rank() == 0),
      parts_(config_.train.accumulate),
      model_(build_model(config_, *inputs.data.train, device, !inputs.resume)),
      arena_(model_->store.arena()),
      queue_(communicator),
      settled_(settle_exchange(inputs, arena_, queue_, communicator)),
      optimizer_(make_optimizer(optimizer_options(config_), arena_)),
      clip_(device, arena_.size()),
      loss_(Tensor::zeros({1}, Layout::plain, device)),
      backend_(backend(device)),
      statistics_(model_->store.statistics()) {
  std::int64_t floats = 0;
  for (const std::span<float> statistics : statistics_)
    floats += static_cast<std::int64_t>(statistics.size());
  if (floats > 0) kept_statistics_ = Tensor::empty({floats}, Layout::plain, device);
}

void StepEngine::start_epoch(std::int64_t, std::int64_t first_step) {
  if (first_step == 0) model_->store.reset_states();
}

void StepEngine::step(const StepRequest& request) {
  begin_step(request);
  exchange_->begin_step(request.step, request.density, weights_, request.lr);
  recorder_->begin_step(request.step);
  run([&] { forward_and_backward(request.step); }, [&] { exchange_->communicate(); }, [&] { finish_step(); });
  record(exchange_->end_step());
}

ForwardContext StepEngine::forward_context() const {
  ForwardContext context;
  context.seed = config_.seed;
  context.rank = static_cast<std::uint32_t>(communicator_.rank());
  return context;
}

void StepEngine::forward_and_backward(std::int64_t step) {
  arena_.clear_gradients();
  save_statistics();
  backend_.fill_zero(loss_.data(), 1);
  in_hooks_ = 0;
  const float share = 1.0f / static_cast<float>(parts_);  // of a micro-batch in the step's mean
  const double clip_norm = local_clip(config_, communicator_.size());
  const bool clips = clip_norm > 0, clip_model = clips && config_.train.clip_local_scope == "model";
  const GradientHook hook = [&](Parameter& parameter) {
    Stopwatch watch(in_hooks_);
    recorder_->take(parameter);
    Parameter* const one = &parameter;
    if (clips) clip_local({&one, 1}, clip_norm);
    exchange_->ready(parameter);
  };
  for (int part = 0; part < parts_; ++part) {
    in_phase(Phase::data, [&] { load_batch(); });
    Variable loss;
    in_phase(Phase::forward, [&] {
      ForwardContext context = forward_context();
      context.step = static_cast<std::uint32_t>(step * parts_ + part);
      loss = forward(part, context);
    });
    backend_.add_scaled(loss_.data(), loss.value().data(), 1, share);
    in_phase(Phase::backward,
             [&] { backward(loss, part + 1 == parts_ && !clip_model ? hook : GradientHook{}, share); });
  }
  if (step == 0 && root_)
    for (const Parameter* parameter : arena_.zero_unwritten_gradients())
      log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
  if (clip_model)
    in_phase(Phase::clip, [&] {
      arena_.zero_unwritten_gradients();
      for (const Parameter* parameter : arena_.parameters()) recorder_->take(*parameter);
      clip_local(arena_.parameters(), clip_norm);
      clipped(clip_norm);
      for (Parameter* parameter : arena_.parameters()) exchange_->ready(*parameter);
    });
  exchange_->complete(loss_.data());
}

void StepEngine::save_statistics() {
  float* to = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    backend_.copy(statistics.data(), to, statistics.size());
    to += statistics.size();
  }
}

void StepEngine::restore_statistics_if_bad() {
  const float* from = kept_statistics_.data();
  for (const std::span<float> statistics : statistics_) {
    backend_.restore_if_bad(exchange_->step_state().status, from, statistics.data(), statistics.size());
    from += statistics.size();
  }
}

void StepEngine::clip_local(std::span<Parameter* const> parameters, double max_norm) {
  bool add = false;
  for (const Parameter* p : parameters)
    clip_.sum_of_squares({p->gradient(), p->numel()}, std::exchange(add, true));
  for (const Parameter* p : parameters) clip_.scale({p->gradient(), p->numel()}, max_norm);
}

void StepEngine::finish_step() {
  exchange_->decode_and_commit();
  const StepState state = exchange_->step_state();
  if (exchange_->committed())
    in_phase(Phase::update, [&] {
      if (config_.train.clip_global > 0) {
        bool add = false;
        for (const Group& group : groups())
          clip_.sum_of_squares(exchange_->averaged(group), std::exchange(add, true));
        clip_.set_gradient_scale(config_.train.clip_global, state.parameters);
      }
      for (const Group& group : groups())
        optimizer_->update(group.begin, exchange_->averaged(group), state, exchange_->form(group));
    });
  restore_statistics_if_bad();
}

void StepEngine::all_reduce(std::span<double> sums) {
  in_phase(Phase::metrics, [&] { queue_.run([&](Communicator& c) { c.all_reduce(sums); }); });
}

// An evaluation begins from recurrent states of zeros, and training goes on from its own.
std::optional<Evaluation> StepEngine::evaluate(Split split, const EvaluationHook& hook) {
  ParameterStore& store = model_->store;
  store.statistics_to_host();
  synchronize_statistics(store, config_.train.bn_stats, queue_, communicator_);
  std::vector<float> training;
  copy_statistics(store, training);
  store.statistics_to_device();
  store.reset_states();
  bool ended = false;
  EvaluationSums sums = evaluation_sums(split, [&](std::int64_t done, std::int64_t batches) {
    ended = !hook(done, batches);
    return !ended;
  });
  restore_statistics(training, store);
  store.statistics_to_device();
  if (ended) return std::nullopt;
  queue_.run([&](Communicator& c) { c.all_reduce(sums.values()); });
  return sums.mean();
}

void StepEngine::check_parameters(const std::string& when) {
  check_same_parameters(arena_, queue_, communicator_, when);
}

std::function<void()> StepEngine::state(RunState& state) {
  std::vector<HostCopy> copies;
  const auto copy = [&](std::span<const float> from, void* to) {
    if (!from.empty()) copies.push_back({from, to});
  };
  if (root_) {
    state.model.weights.resize(arena_.all_weights().size());
    copy(arena_.all_weights(), state.model.weights.data());
    const std::vector<std::span<float>> buffers = optimizer_->state();
    state.optimizer.resize(buffers.size());
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      state.optimizer[i].resize(arena_.size());
      copy(buffers[i], state.optimizer[i].data());
    }
  }
  model_->store.statistics_to_host();
  copy_statistics(model_->store, state.model.statistics);
  std::vector<DeviceFloats> later;
  state.exchange = exchange_->state(&later);  // before the residuals, which it may write to the arena
  for (const DeviceFloats& floats : later) copy(floats.values, state.exchange.data() + floats.offset);
  const bool has_residual = settled_.options.compressing();
  state.residual.resize(has_residual ? arena_.size() : 0);
  if (has_residual)
    for (const Group& group : groups())
      copy(arena_.residual(group.begin, group.end), state.residual.data() + group.begin);
  return copy_to_host(copies);
}

void StepEngine::load_state(const RunState& state) {
  const auto copy = [&](const std::vector<float>& from, std::size_t offset, std::span<float> to) {
    if (from.size() < offset + to.size()) throw UserError("the checkpoint is of another model");
    if (!to.empty()) backend_.to_device(to.data(), from.data() + offset, to.size());
  };
  copy(state.model.weights, 0, arena_.all_weights());
  const std::vector<std::span<float>> buffers = optimizer_->state();
  if (state.optimizer.size() != buffers.size()) throw UserError("the checkpoint is of another optimizer");
  for (std::size_t i = 0; i < buffers.size(); ++i) copy(state.optimizer[i], 0, buffers[i]);
  restore_statistics(state.model.statistics, model_->store);
  model_->store.statistics_to_device();
  if (!state.residual.empty())
    for (const Group& group : groups())
      copy(state.residual, group.begin, arena_.residual(group.begin, group.end));
  if (!state.exchange.empty()) exchange_->load_state(state.exchange);
}

std::string StepEngine::checksum() {
  return checksum_hex(arena_.host_weights());
}

int first_bad_parameter(const ParameterArena& arena) {
  const auto parameters = arena.parameters();
  const auto bad = std::find_if(parameters.begin(), parameters.end(), [](const Parameter* p) {
    return !std::all_of(p->gradient(), p->gradient() + p->numel(), [](float g) { return std::isfinite(g); });
  });
  return bad == parameters.end() ? -1 : static_cast<int>(bad - parameters.begin());
}

double local_clip(const Config& config, int ranks) {
  return config.compress.clip > 0 ? config.compress.clip * std::sqrt(ranks) : config.train.clip_local;
}

}  // namespace topknot
