// Steps on a CPU: their parts run at once, and the outcome is known when the step has ended.
#include "train/runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "nn/base/clock.h"
#include "train/plan/plan.h"
#include "train/setup.h"
#include "train/trace.h"

namespace topknot {
namespace {

class CpuRunner final : public Runner {
 public:
  CpuRunner(const RunInputs& inputs, Communicator& communicator)
      : config_(inputs.config), folder_(inputs.folder), communicator_(communicator) {
    traits_.name = config_.train.precision == "bf16" ? "cpu, bf16" : "cpu";
    // Ranks that exchange every step may as well report every step; those with local steps would wait for each other.
    constexpr std::int64_t kMost = 16;
    const bool records =
        asks_for_steps(config_.train.record_gradients) || config_.train.distribution_every > 0;
    if (!records) traits_.steps_ahead = std::clamp<std::int64_t>(config_.exchange.every, 1, kMost);
  }

  std::unique_ptr<Exchange> make_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                          const ExchangeOptions& options) override {
    auto exchange = std::make_unique<Exchange>(arena, queue, options);
    arena_ = &arena, exchange_ = exchange.get();
    return exchange;
  }
  std::unique_ptr<Batches> make_batches(const Dataset& dataset, const Module& model, bool train) override {
    return std::make_unique<Batches>(
        dataset, loader_options(config_, dataset, train, communicator_.rank(), communicator_.size()),
        in_host_memory(model));
  }
  void begin_run(std::int64_t total_steps) override {
    trace_.emplace(config_.train.profile_steps, total_steps, folder_.path, exchange_->groups(),
                   communicator_.rank(), communicator_.overlaps());
  }

  void begin_step(const StepContext& context, int, double awaited_s) override {
    trace_->end_step(exchange_->spans());  // the step before, with the metrics that followed it
    times_ = {.data_s = awaited_s};
    in_hooks_ = 0;
    trace_->begin_step(context.step);
  }
  void run(const StepParts& parts) override { parts.compute(), parts.communicate(), parts.apply(); }
  void in_phase(Phase phase, const std::function<void()>& work) override {
    double untimed = 0;
    const auto timed = [&](double& total, TraceRow row, const char* name) {
      const Stopwatch watch(total);
      const StepTrace::Span span(*trace_, row, name);
      work();
    };
    switch (phase) {
      case Phase::data:
        return timed(times_.data_s, TraceRow::compute, "data");
      case Phase::forward:
        return timed(times_.forward_s, TraceRow::compute, "forward");
      case Phase::backward:
        backward_begin_ = Clock::now();
        return timed(times_.backward_s, TraceRow::compute, "backward");
      case Phase::hook: {
        const Stopwatch watch(in_hooks_);
        return work();
      }
      case Phase::clip:
        return timed(untimed, TraceRow::compute, "clip");
      case Phase::update:
        return timed(times_.update_s, TraceRow::compute, "update");
      case Phase::metrics:
        return timed(untimed, TraceRow::wait, "metrics");
      case Phase::evaluate:
        return work();
    }
  }
  void end_step(const StepReport& report, const float* loss) override {
    StepReport& made = reports_.emplace_back(report);
    made.loss = *loss;
    if (!report.committed() && report.bad_parameter < 0) made.bad_parameter = first_bad_parameter(*arena_);
    // The exchange counts its part of the hooks; recording and clipping in them count nowhere.
    times_.backward_s -= in_hooks_;
    times_.makespan_s = measured_makespan(exchange_->spans(), backward_begin_);
    made.times += times_;
  }

  std::vector<StepReport> reports(std::size_t count) override {
    const auto end = reports_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<StepReport> oldest(reports_.begin(), end);
    reports_.erase(reports_.begin(), end);
    return oldest;
  }
  std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) override {
    for (const HostCopy& copy : copies) std::memcpy(copy.to, copy.from.data(), copy.from.size_bytes());
    return {};
  }
  void finish() override {
    trace_->end_step(exchange_->spans());
    trace_->finish();
  }
  void release() noexcept override { trace_.reset(); }

 private:
  const Config& config_;
  const RunDirectory folder_;
  Communicator& communicator_;
  const ParameterArena* arena_ = nullptr;
  Exchange* exchange_ = nullptr;
  std::optional<StepTrace> trace_;
  std::vector<StepReport> reports_;   // that were not asked for
  StepSeconds times_;                 // outside of the exchange
  double in_hooks_ = 0;               // seconds of the backward pass
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
