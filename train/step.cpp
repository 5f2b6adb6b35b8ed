#include "train/step.h"

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "train/checks.h"
#include "train/setup.h"

namespace topknot {

Step::Step(const RunInputs& inputs, Communicator& communicator)
    : config_(inputs.config),
      communicator_(communicator),
      runner_(parse_device(config_.train.device).kind == DeviceKind::cuda
                  ? make_cuda_runner(inputs, communicator)
                  : make_cpu_runner(inputs, communicator)),
      replica_(inputs, communicator, *runner_),
      queue_(communicator),
      resolved_(settle_exchange(inputs, replica_.arena(), queue_)),
      rule_(make_step_rule(config_, communicator, *runner_, replica_, queue_)),
      exchange_(runner_->make_exchange(shared_weights(), queue_, resolved_.options)),
      recorder_(config_, inputs.folder, arena(), exchange_.get(), communicator.rank() == 0) {
  replica_.make_batches();
  rule_->exchange_by(*exchange_, recorder_);
  if (arena().device().kind != DeviceKind::cpu && communicator.rank() == 0 &&
      (resolved_.planned || resolved_.chosen))
    log_warning("exchange: the plan is made from this host's CPU times, and the run computes on a GPU");
}

Step::~Step() {
  runner_->release();
}

void Step::exchange_by(const ExchangeOptions& options) {
  TOPKNOT_CHECK(&shared_weights() == &arena() && arena().device().kind == DeviceKind::cpu,
                "another exchange of gradients on a CPU");
  resolved_ = {options};
  exchange_.reset();
  exchange_ = runner_->make_exchange(shared_weights(), queue_, options);
  rule_->exchange_by(*exchange_, recorder_);
}

void Step::all_reduce(std::span<double> sums) {
  runner_->in_phase(Runner::Phase::metrics,
                    [&] { queue_.run([&](Communicator& c) { sum_doubles(c, sums); }); });
}

void Step::all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) {
  runner_->in_phase(Runner::Phase::metrics,
                    [&] { queue_.run([&](Communicator& c) { c.all_gather(mine, all); }); });
}

std::optional<Evaluation> Step::evaluate(Split split, const EvaluationHook& hook) {
  replica_.bring_statistics_together(queue_);
  rule_->swap_weights();
  std::optional<EvaluationSums> sums = replica_.evaluate(split, hook);
  rule_->swap_weights();
  if (!sums) return std::nullopt;
  queue_.run([&](Communicator& c) { sum_doubles(c, sums->values()); });
  return sums->mean();
}

void Step::check_parameters(const std::string& when) {
  check_same_parameters(shared_weights(), queue_, communicator_, when);
}

std::function<void()> Step::state(RunState& state, bool shared_too) {
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
  if (communicator_.rank() == 0 || shared_too) {
    state.model.weights.resize(shared_weights().all_weights().size());
    copy(shared_weights().all_weights(), state.model.weights.data());
    copy_all(rule_->shared_state(), state.optimizer);
  }
  copy_all(rule_->own_state(), state.inner);
  replica_.store().statistics_to_host();
  copy_statistics(replica_.store(), state.model.statistics);
  std::vector<DeviceFloats> later;
  // Before the residuals, which it may write to the arena.
  state.exchange = rule_->exchange_state(*exchange_, &later);
  for (const DeviceFloats& floats : later) copy(floats.values, state.exchange.data() + floats.offset);
  const bool has_residual = resolved_.options.compressing();
  state.residual.resize(has_residual ? arena().size() : 0);
  if (has_residual)
    for (const Group& group : groups())
      copy(shared_weights().residual(group.begin, group.end), state.residual.data() + group.begin);
  return runner_->copy_to_host(copies);
}

void Step::load_state(const RunState& state) {
  const DeviceBackend& device = backend(arena().device());
  const auto copy = [&](const std::vector<float>& from, std::size_t offset, std::span<float> to) {
    if (from.size() < offset + to.size()) throw UserError("the checkpoint is of another model");
    if (!to.empty()) device.to_device(to.data(), from.data() + offset, to.size());
  };
  const auto copy_all = [&](const std::vector<std::vector<float>>& from,
                            const std::vector<std::span<float>>& to) {
    if (from.size() != to.size()) throw UserError("the checkpoint is of another optimizer");
    for (std::size_t i = 0; i < to.size(); ++i) copy(from[i], 0, to[i]);
  };
  for (ParameterArena* arena : {&replica_.arena(), &shared_weights()})
    copy(state.model.weights, 0, arena->all_weights());
  if (!state.inner.empty()) copy_all(state.inner, rule_->own_state());  // a rank that joins has none
  copy_all(state.optimizer, rule_->shared_state());
  restore_statistics(state.model.statistics, replica_.store());
  replica_.store().statistics_to_device();
  if (!state.residual.empty())
    for (const Group& group : groups())
      copy(state.residual, group.begin, shared_weights().residual(group.begin, group.end));
  if (!state.exchange.empty()) rule_->load_exchange_state(*exchange_, state.exchange);
}

std::string Step::checksum() const {
  return checksum_hex(shared_weights().host_weights());
}

}  // namespace topknot
