// The engine on a CPU: what a step did is known when it is done.
#include <algorithm>
#include <cmath>

#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "nn/core/base/stopwatch.h"
#include "optim/clip.h"
#include "train/checksum.h"
#include "train/engine.h"
#include "train/evaluate.h"
#include "train/plan/exchange_choice.h"
#include "train/plan/exchange_plan.h"
#include "train/recorder.h"
#include "train/trace.h"
#include "train/trainer.h"

namespace topknot {
namespace {

using Clock = std::chrono::steady_clock;

class CpuEngine final : public Engine {
 public:
  CpuEngine(const RunInputs& inputs, Communicator& communicator)
      : config_(inputs.config),
        communicator_(communicator),
        root_(communicator.rank() == 0),
        model_(build_model(config_, *inputs.data.train)),
        arena_(model_->store.arena()),
        queue_(communicator),
        settled_(settle_exchange(inputs, arena_, queue_, communicator)),
        exchange_(arena_, queue_, settled_.options),
        optimizer_(make_optimizer(optimizer_options(config_), arena_)),
        train_loader_(*inputs.data.train, loader_options(config_, *inputs.data.train, true,
                                                         communicator.rank(), communicator.size())),
        test_loader_(*inputs.data.test, loader_options(config_, *inputs.data.test, false, communicator.rank(),
                                                       communicator.size())),
        weights_(train_loader_.weights()),
        recorder_(config_, inputs.folder, arena_, &exchange_, root_),
        trace_(config_.train.profile_steps, plan_steps(config_, train_loader_).total_steps,
               inputs.folder.path, exchange_.groups(), communicator) {}

  const ParameterArena& arena() const override { return arena_; }
  const std::vector<Group>& groups() const override { return exchange_.groups(); }
  const Loader& train_loader() const override { return train_loader_; }
  std::string device() const override { return "cpu"; }
  double modelled_makespan() const override { return settled_.modelled_makespan(exchange_.groups()); }

  void start_epoch(std::int64_t epoch) override { train_loader_.start_epoch(epoch); }
  std::int64_t steps_ahead() const override { return 1; }
  std::vector<StepStats> stats() override { return {stats_}; }

  void step(const StepRequest& request) override {
    stats_ = {};
    trace_.begin_step(request.step);
    exchange_.begin_step(request.step, request.density, weights_, request.lr);
    recorder_.begin_step(request.step);
    save_statistics();
    stats_.loss = forward_and_backward(request.step);
    const StepResult result = exchange_.finish(std::isfinite(stats_.loss));
    if (result.committed)
      update(request.step, request.lr);
    else
      restore_statistics();  // a skipped step leaves no trace
    stats_.committed = result.committed;
    stats_.bad_rank = result.bad_rank;
    stats_.bytes_sent = result.stats.bytes_sent;
    stats_.bytes_received = result.stats.bytes_received;
    stats_.selected = result.stats.selected;
    stats_.threshold = result.stats.threshold;
    stats_.times.encode_s = result.stats.encode;
    stats_.times.communicate_s = result.stats.communicate;
    stats_.times.decode_s = result.stats.decode;
    stats_.times.exposed_s = result.stats.exposed;
    stats_.times.makespan_s = measured_makespan(exchange_.spans(), backward_begin_);
  }

  void end_step(const StepRecord& record, MetricsWriter* metrics) override {
    trace_.end_step(exchange_.spans());
    if (metrics) recorder_.end_step(record, *metrics);
  }

  void all_reduce(std::span<double> sums) override {
    const StepTrace::Span span(trace_, TraceRow::wait, "metrics");
    queue_.run([&](Communicator& c) { c.all_reduce(sums); });
  }

  Evaluation evaluate() override {
    synchronize_statistics(model_->store, config_.train.bn_stats, queue_, communicator_);
    return topknot::evaluate(*model_, test_loader_, queue_);
  }

  void check_parameters(const std::string& when) override {
    check_same_parameters(arena_, queue_, communicator_, when);
  }

  std::string checksum() override { return checksum_hex(arena_.weights()); }

  void finish() override {
    recorder_.finish();
    trace_.finish();
  }

 private:
  // Returns this rank's loss, the mean over its micro-batches.
  double forward_and_backward(std::int64_t step) {
    StepRecord& times = stats_.times;
    arena_.clear_gradients();
    const int parts = config_.train.accumulate;
    const double clip_norm = local_clip(config_, communicator_.size());
    const bool clip = clip_norm > 0, clip_model = clip && config_.train.clip_local_scope == "model";
    double loss = 0, in_hooks = 0;
    const GradientHook hook = [&](Parameter& parameter) {
      Stopwatch watch(in_hooks);
      recorder_.take(parameter);
      if (clip) clip_gradient(parameter, clip_norm);
      exchange_.ready(parameter);
    };
    for (int part = 0; part < parts; ++part) {
      Batch batch;
      {
        Stopwatch watch(times.data_s);
        const StepTrace::Span span(trace_, TraceRow::compute, "data");
        TOPKNOT_CHECK(train_loader_.next(batch), "an epoch has fewer batches than its steps");
      }
      Variable part_loss;
      {
        Stopwatch watch(times.forward_s);
        const StepTrace::Span span(trace_, TraceRow::compute, "forward");
        ForwardContext context;
        context.seed = config_.seed;
        context.rank = static_cast<std::uint32_t>(communicator_.rank());
        context.step = static_cast<std::uint32_t>(step * parts + part);
        part_loss = batch_loss(model_->module->forward(Variable(batch.images), context), batch);
      }
      loss += part_loss.value().data()[0] / parts;
      Stopwatch watch(times.backward_s);
      backward_begin_ = Clock::now();
      const StepTrace::Span span(trace_, TraceRow::compute, "backward");
      backward(part_loss, part + 1 == parts && !clip_model ? hook : GradientHook{},
               1.0f / static_cast<float>(parts));
    }
    if (step == 0 && root_)
      for (const Parameter* parameter : arena_.zero_unwritten_gradients())
        log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
    if (clip_model) {
      const StepTrace::Span span(trace_, TraceRow::compute, "clip");
      arena_.zero_unwritten_gradients();
      for (const Parameter* parameter : arena_.parameters()) recorder_.take(*parameter);
      clip_gradients(arena_.parameters(), clip_norm);
      for (Parameter* parameter : arena_.parameters()) exchange_.ready(*parameter);
    }
    times.backward_s -= in_hooks;  // the exchange accounts for what happens there
    return loss;
  }

  // Batch norm's running statistics, which the forward pass has already moved when a step turns out to be
  // bad.
  void save_statistics() {
    statistics_.clear();
    for (const auto& buffer : model_->store.buffers())
      statistics_.insert(statistics_.end(), buffer->values.begin(), buffer->values.end());
  }
  void restore_statistics() {
    auto from = statistics_.cbegin();
    for (const auto& buffer : model_->store.buffers()) {
      std::copy_n(from, buffer->values.size(), buffer->values.begin());
      from += static_cast<std::ptrdiff_t>(buffer->values.size());
    }
  }

  void update(std::int64_t step, double lr) {
    Stopwatch watch(stats_.times.update_s);
    const StepTrace::Span span(trace_, TraceRow::compute, "update");
    double factor = 1.0;
    if (config_.train.clip_global > 0) {
      double squares = 0;
      for (const Group& group : exchange_.groups()) squares += sum_of_squares(exchange_.averaged(group));
      factor = clip_factor(std::sqrt(squares), config_.train.clip_global);
    }
    for (const Group& group : exchange_.groups())
      optimizer_->update(group.begin, exchange_.averaged(group), {step, lr, factor}, exchange_.form(group));
  }

  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  const SettledExchange settled_;
  Exchange exchange_;
  std::unique_ptr<Optimizer> optimizer_;
  Loader train_loader_, test_loader_;
  const std::vector<float> weights_;
  Recorder recorder_;
  StepTrace trace_;

  StepStats stats_;                   // of the last step
  std::vector<float> statistics_;     // as before this step
  Clock::time_point backward_begin_;  // of the pass that drives the exchange
};

}  // namespace

double local_clip(const Config& config, int ranks) {
  return config.compress.clip > 0 ? config.compress.clip * std::sqrt(ranks) : config.train.clip_local;
}

std::unique_ptr<Engine> make_cpu_engine(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<CpuEngine>(inputs, communicator);
}

}  // namespace topknot
