// Steps on a CPU: their parts run at once, and the outcome is known when the step has ended.
#include "train/runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "nn/base/clock.h"
#include "train/plan/exchange_plan.h"
#include "train/setup.h"
#include "train/trace.h"
#include "train/trainer.h"

namespace topknot {
namespace {

class CpuRunner final : public Runner {
 public:
  CpuRunner(const RunInputs& inputs, Communicator& communicator)
      : config_(inputs.config), folder_(inputs.folder), communicator_(communicator) {}

  Device device() const override { return {}; }
  std::string name() const override { return config_.train.precision == "bf16" ? "cpu, bf16" : "cpu"; }
  std::unique_ptr<Exchange> make_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                          const ExchangeOptions& options) override {
    auto exchange = std::make_unique<Exchange>(arena, queue, options);
    arena_ = &arena, exchange_ = exchange.get();
    return exchange;
  }
  std::unique_ptr<Batches> make_batches(const Dataset& dataset, const Module& model, bool train) override {
    return std::make_unique<HostBatches>(
        dataset, loader_options(config_, dataset, train, communicator_.rank(), communicator_.size()), model);
  }
  void begin_run(std::int64_t total_steps) override {
    trace_.emplace(TraceRange{config_.train.profile_from, config_.train.profile_steps, total_steps},
                   folder_.path, exchange_->groups(), communicator_.rank(), communicator_.overlaps());
  }

  void begin_step(const StepRequest& request, double awaited_s) override {
    stats_ = {};
    stats_.times.data_s = awaited_s;
    in_hooks_ = 0;
    trace_->begin_step(request.step);
  }
  void run(const StepParts& parts) override { parts.compute(), parts.communicate(), parts.apply(); }
  void in_phase(Phase phase, const std::function<void()>& work) override {
    StepRecord& times = stats_.times;
    double untimed = 0;
    const auto timed = [&](double& total, TraceRow row, const char* name) {
      const Stopwatch watch(total);
      const StepTrace::Span span(*trace_, row, name);
      work();
    };
    switch (phase) {
      case Phase::data:
        return timed(times.data_s, TraceRow::compute, "data");
      case Phase::forward:
        return timed(times.forward_s, TraceRow::compute, "forward");
      case Phase::backward:
        backward_begin_ = Clock::now();
        return timed(times.backward_s, TraceRow::compute, "backward");
      case Phase::hook: {
        const Stopwatch watch(in_hooks_);
        return work();
      }
      case Phase::clip:
        return timed(untimed, TraceRow::compute, "clip");
      case Phase::update:
        return timed(times.update_s, TraceRow::compute, "update");
      case Phase::metrics:
        return timed(untimed, TraceRow::wait, "metrics");
      case Phase::evaluate:
        return work();
    }
  }
  void end_step(const StepResult& result, const float* loss) override {
    stats_.loss = *loss;
    stats_.committed = result.committed;
    stats_.bad_rank = result.bad_rank;
    if (!result.committed) stats_.bad_parameter = first_bad_parameter(*arena_);
    stats_.bytes_sent = result.stats.bytes_sent;
    stats_.bytes_received = result.stats.bytes_received;
    stats_.selected = result.stats.selected;
    stats_.threshold = result.stats.threshold;
    stats_.times.backward_s -= in_hooks_;  // the exchange accounts for what happens there
    stats_.times.encode_s = result.stats.encode;
    stats_.times.communicate_s = result.stats.communicate;
    stats_.times.decode_s = result.stats.decode;
    stats_.times.exposed_s = result.stats.exposed;
    stats_.times.makespan_s = measured_makespan(exchange_->spans(), backward_begin_);
  }

  std::int64_t steps_ahead() const override { return 1; }
  std::vector<StepStats> stats(std::size_t) override { return {stats_}; }
  void reported() override { trace_->end_step(exchange_->spans()); }
  std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) override {
    for (const HostCopy& copy : copies) std::memcpy(copy.to, copy.from.data(), copy.from.size_bytes());
    return {};
  }
  void finish() override { trace_->finish(); }
  void release() noexcept override { trace_.reset(); }

 private:
  const Config& config_;
  const RunDirectory folder_;
  Communicator& communicator_;
  const ParameterArena* arena_ = nullptr;
  Exchange* exchange_ = nullptr;
  std::optional<StepTrace> trace_;
  StepStats stats_;                   // of the last step
  double in_hooks_ = 0;               // seconds of its backward pass
  Clock::time_point backward_begin_;  // of the pass that drives the exchange
};

}  // namespace

std::unique_ptr<Runner> make_cpu_runner(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<CpuRunner>(inputs, communicator);
}

int first_bad_parameter(const ParameterArena& arena) {
  const auto parameters = arena.parameters();
  const auto bad = std::find_if(parameters.begin(), parameters.end(), [](const Parameter* p) {
    return !std::all_of(p->gradient(), p->gradient() + p->numel(), [](float g) { return std::isfinite(g); });
  });
  return bad == parameters.end() ? -1 : static_cast<int>(bad - parameters.begin());
}

}  // namespace topknot
