// The engine on a CPU: the outcome of a step is known when the step has ended.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/stopwatch.h"
#include "optim/clip.h"
#include "train/evaluate.h"
#include "train/plan/exchange_plan.h"
#include "train/step_engine.h"
#include "train/trace.h"

namespace topknot {
namespace {

using Clock = std::chrono::steady_clock;

class CpuEngine final : public StepEngine {
 public:
  CpuEngine(const RunInputs& inputs, Communicator& communicator)
      : StepEngine(inputs, communicator, {}),
        exchange_(arena_, queue_, settled_.options),
        train_loader_(*inputs.data.train, loader_options(config_, *inputs.data.train, true,
                                                         communicator.rank(), communicator.size())),
        test_loader_(*inputs.data.test, loader_options(config_, *inputs.data.test, false, communicator.rank(),
                                                       communicator.size())),
        held_out_(inputs.data.held_out.get()),
        recorder_(config_, inputs.folder, arena_, &exchange_, root_, inputs.resume),
        trace_({config_.train.profile_from, config_.train.profile_steps,
                plan_steps(config_, train_loader_).total_steps},
               inputs.folder.path, exchange_.groups(), communicator.rank(), communicator.overlaps()) {
    weights_ = train_loader_.weights();
    attach(exchange_, recorder_);
  }

  const Loader& train_loader() const override { return train_loader_; }
  std::string device() const override { return model_->activations == DType::bf16 ? "cpu, bf16" : "cpu"; }
  void start_epoch(std::int64_t epoch, std::int64_t first_step) override {
    StepEngine::start_epoch(epoch, first_step);
    train_loader_.start_epoch(epoch, first_step * parts_);
  }
  void await_batch() override {
    const Stopwatch watch(awaited_s_);
    train_loader_.await_batch();
  }
  std::int64_t steps_ahead() const override { return 1; }
  std::vector<StepStats> stats(std::size_t) override { return {stats_}; }
  void end_step(const StepRecord& record, MetricsWriter* metrics) override {
    trace_.end_step(exchange_.spans());
    if (metrics) recorder_.end_step(record, *metrics);
  }
  void finish() override {
    recorder_.finish();
    trace_.finish();
  }

 private:
  void begin_step(const StepRequest& request) override {
    stats_ = {};
    stats_.times.data_s = std::exchange(awaited_s_, 0.0);
    trace_.begin_step(request.step);
  }
  void run(const Work& forward_and_backward, const Work& communicate, const Work& finish) override {
    forward_and_backward(), communicate(), finish();
  }
  void in_phase(Phase phase, const Work& work) override {
    StepRecord& times = stats_.times;
    double untimed = 0;
    const auto timed = [&](double& total, TraceRow row, const char* name) {
      Stopwatch watch(total);
      const StepTrace::Span span(trace_, row, name);
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
      case Phase::clip:
        return timed(untimed, TraceRow::compute, "clip");
      case Phase::update:
        return timed(times.update_s, TraceRow::compute, "update");
      case Phase::metrics:
        return timed(untimed, TraceRow::wait, "metrics");
    }
  }

  void load_batch() override {
    batch_ = {};
    TOPKNOT_CHECK(train_loader_.next(batch_), "an epoch has fewer batches than its steps");
  }
  Variable forward(int, ForwardContext& context) override {
    frames_ = output_frames(*model_->module, batch_);
    context.frames = frames_;
    return batch_loss(*model_->module, model_->forward(batch_.images, context), batch_,
                      config_.train.label_smoothing);
  }

  // Where clipping cuts nearly every gradient, only its direction is left, which costs accuracy: dgc on CIFAR-10 with
  // compress.clip=0.25 ended twelve points below dgc without.
  void clipped(double max_norm) override {
    constexpr int kWatched = 100, kMany = 90;
    cuts_ += clip_factor(std::sqrt(*clip_.sum()), max_norm) < 1;
    if (++clips_ != kWatched || cuts_ < kMany || communicator_.rank() != 0) return;
    log_warning(
        fmt::format("{}: {} of the first {} gradients were longer and were cut, so that little but their "
                    "direction counts; raise "
                    "it or leave it out",
                    config_.compress.clip > 0 ? "compress.clip" : "train.clip_local", cuts_, kWatched));
  }

  void record(const StepResult& result) override {
    stats_.loss = loss_.data()[0];
    stats_.committed = result.committed;
    stats_.bad_rank = result.bad_rank;
    if (!result.committed) stats_.bad_parameter = first_bad_parameter(arena_);
    stats_.bytes_sent = result.stats.bytes_sent;
    stats_.bytes_received = result.stats.bytes_received;
    stats_.selected = result.stats.selected;
    stats_.threshold = result.stats.threshold;
    stats_.times.backward_s -= in_hooks_;  // the exchange accounts for what happens there
    stats_.times.encode_s = result.stats.encode;
    stats_.times.communicate_s = result.stats.communicate;
    stats_.times.decode_s = result.stats.decode;
    stats_.times.exposed_s = result.stats.exposed;
    stats_.times.makespan_s = measured_makespan(exchange_.spans(), backward_begin_);
  }
  std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) override {
    for (const HostCopy& copy : copies) std::memcpy(copy.to, copy.from.data(), copy.from.size_bytes());
    return {};
  }
  EvaluationSums evaluation_sums(Split split, const EvaluationHook& hook) override {
    if (split == Split::test) return topknot::evaluation_sums(*model_, test_loader_, hook);
    Loader loader(*held_out_,
                  loader_options(config_, *held_out_, false, communicator_.rank(), communicator_.size()));
    return topknot::evaluation_sums(*model_, loader, hook);
  }

  Exchange exchange_;
  Loader train_loader_, test_loader_;
  const Dataset* held_out_;  // null where the run has none
  Recorder recorder_;
  StepTrace trace_;

  StepStats stats_;       // of the last step
  double awaited_s_ = 0;  // of the next one, in await_batch()
  Batch batch_;
  std::vector<std::int32_t> frames_;  // of its recordings, as ForwardContext has them
  int clips_ = 0, cuts_ = 0;          // gradients of this start that local clipping has looked at, and cut
  Clock::time_point backward_begin_;  // of the pass that drives the exchange
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<CpuEngine>(inputs, communicator);
}

}  // namespace topknot
