#include "train/trainer.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "compress/byte_count.h"
#include "nn/core/check.h"
#include "nn/core/log.h"
#include "nn/core/stopwatch.h"
#include "optim/clip.h"
#include "train/checksum.h"
#include "train/evaluate.h"
#include "train/exchange_measure.h"
#include "train/exchange_plan.h"
#include "train/layer_density.h"
#include "train/recorder.h"
#include "train/reporter.h"
#include "train/stop.h"
#include "train/trace.h"

namespace topknot {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// One rank's training state and loop.
class Trainer {
 public:
  Trainer(const RunInputs& inputs, Communicator& communicator)
      : inputs_(inputs),
        config_(inputs.config),
        communicator_(communicator),
        root_(communicator.rank() == 0),
        model_(build_model(config_, *inputs.data.train)),
        arena_(model_->store.arena()),
        queue_(communicator),
        exchange_(arena_, queue_, settled_exchange_options()),
        optimizer_(make_optimizer(optimizer_options(config_), arena_)),
        schedule_(make_schedule(schedule_options(config_), config_.optimizer.lr)),
        train_loader_(*inputs.data.train, loader_options(config_, *inputs.data.train, true,
                                                         communicator.rank(), communicator.size())),
        test_loader_(*inputs.data.test, loader_options(config_, *inputs.data.test, false, communicator.rank(),
                                                       communicator.size())),
        plan_(plan_steps(config_, train_loader_)),
        weights_(train_loader_.weights()),
        reporter_(inputs, plan_, communicator),
        recorder_(config_, inputs.folder, arena_, exchange_, root_),
        trace_(config_.train.profile_steps, plan_.total_steps, inputs.folder.path, exchange_.groups(),
               communicator) {}

  RunOutcome run() {
    reporter_.announce(communicator_, exchange_, arena_.size(), train_loader_.steps_per_epoch());
    check_parameters("at the start");
    reporter_.begin();
    bool stopped = false;
    std::int64_t epoch = 0;
    while (step_ < plan_.total_steps && !stopped && !target_reached()) {
      stopped = run_epoch(epoch++);
      if (stopped || target_reached()) break;
      const bool last = step_ >= plan_.total_steps;
      if (last || evaluation_due()) run_evaluation();
    }
    check_parameters("at the end");
    recorder_.finish();
    trace_.finish();
    reporter_.finish();
    RunOutcome outcome{stopped, evaluation_.accuracy, evaluation_.loss, checksum_hex(arena_.weights())};
    if (stopped) {
      log_info("stopped by a signal after step " + std::to_string(step_) + "; " + inputs_.folder.path +
               " has the steps so far");
      return outcome;
    }
    reporter_.end(step_, skipped_, outcome.parameter_checksum, modelled_seconds());
    return outcome;
  }

 private:
  // With what only a run can measure; what that was stands in the run folder.
  ExchangeOptions settled_exchange_options() {
    ExchangeOptions options = exchange_options(config_);
    options.layer_density =
        layer_density(config_, *inputs_.data.train, arena_, queue_, communicator_, inputs_.folder);
    choice_ = choose_exchange(config_, *inputs_.data.train, arena_, queue_, inputs_.folder, options);
    if (!root_ || !(choice_.planned || choice_.chosen)) return options;
    Config effective = config_;
    auto origins = inputs_.origins;
    effective.exchange.groups.assign(options.groups.begin(), options.groups.end());
    effective.exchange.collective = options.collective;
    if (choice_.planned) origins["exchange.groups"] = Origin::measured;
    if (choice_.chosen) origins["exchange.collective"] = Origin::measured;
    rewrite_config(inputs_.folder, effective, origins);
    return options;
  }

  // By the run's profile; 0 where there is none.
  double modelled_seconds() const {
    if (!choice_.profile) return 0;
    std::vector<std::size_t> parameters;
    for (const Group& group : exchange_.groups()) parameters.push_back(group.parameters.size());
    return modelled_makespan(*choice_.profile, parameters);
  }

  // True where the run is to stop.
  bool run_epoch(std::int64_t epoch) {
    train_loader_.start_epoch(epoch);
    double loss_sum = 0;
    std::int64_t steps = 0;
    for (; steps < plan_.steps_per_epoch && step_ < plan_.total_steps; ++steps) {
      const auto [record, stop] = run_step(epoch);
      loss_sum += record.loss;
      if (root_) recorder_.end_step(record, *reporter_.metrics());
      if (config_.train.check_every > 0 && step_ % config_.train.check_every == 0)
        check_parameters("during training");
      if (stop) return true;
      const bool epoch_goes_on = steps + 1 < plan_.steps_per_epoch && step_ < plan_.total_steps;
      if (epoch_goes_on && evaluation_due()) run_evaluation();  // at its end: once the epoch is told
      if (target_reached()) return false;
    }
    reporter_.epoch(step_, loss_sum / static_cast<double>(steps));
    return false;
  }

  // The same on all ranks, as the evaluation is.
  bool target_reached() const {
    return config_.train.target_accuracy > 0 && evaluation_.accuracy >= config_.train.target_accuracy;
  }

  // Whether the last step completed another train.eval_every epochs.
  bool evaluation_due() const {
    const double every = config_.train.eval_every * static_cast<double>(plan_.steps_per_epoch);
    if (every <= 0) return false;
    const double done = static_cast<double>(step_);
    return std::floor(done / every) > std::floor((done - 1) / every);
  }

  std::pair<StepRecord, bool> run_step(std::int64_t epoch) {
    const Clock::time_point start = Clock::now();
    StepRecord record;
    record.lr = schedule_->lr(step_, plan_.steps_per_epoch, plan_.total_steps);
    record.density =
        config_.compress.name == "dense" ? 1.0 : density_at_epoch(config_, static_cast<int>(epoch));
    trace_.begin_step(step_);
    exchange_.begin_step(step_, record.density, weights_, record.lr);
    recorder_.begin_step(step_);
    save_statistics();
    const double loss = forward_and_backward(record);
    const StepResult result = exchange_.finish(std::isfinite(loss));
    if (result.committed)
      update(record);
    else
      restore_statistics();  // a skipped step leaves no trace
    ++step_;

    record.encode_s = result.stats.encode;
    record.communicate_s = result.stats.communicate;
    record.decode_s = result.stats.decode;
    record.exposed_s = result.stats.exposed;
    record.makespan_s = measured_makespan(exchange_.spans(), backward_begin_);
    // One small sum a step: what the ranks' metrics have in common, and whether anyone wants to stop.
    // The loss counts as the rank's gradient does, by the weight of its shard.
    const double weight = weights_[static_cast<std::size_t>(communicator_.rank())];
    std::array<double, 5> sums{loss * weight, static_cast<double>(result.stats.bytes_sent),
                               static_cast<double>(result.stats.bytes_received),
                               static_cast<double>(result.stats.selected), stop_signal() ? 1.0 : 0.0};
    {
      const StepTrace::Span span(trace_, TraceRow::wait, "metrics");
      queue_.run([&](Communicator& c) { c.all_reduce(std::span<double>(sums)); });
    }
    trace_.end_step(exchange_.spans());
    const double ranks = communicator_.size();
    record.step = step_;
    record.loss = sums[0] / ranks;
    const ByteCount bytes{static_cast<std::uint64_t>(sums[1]), static_cast<std::uint64_t>(sums[2]),
                          static_cast<std::uint64_t>(communicator_.size()) * sizeof(float) * arena_.size()};
    record.selected = sums[3] / ranks;
    record.threshold = result.stats.threshold;
    record.skipped = !result.committed;
    const double seconds = seconds_since(start);
    reporter_.complete(record, bytes, seconds);
    note_skip(result);
    reporter_.step(record, seconds);
    return {record, sums[4] > 0};
  }

  // The greatest norm of this rank's gradient; 0: no clipping. compress.clip is thr_G of Lin et al., "Deep
  // Gradient Compression", section 3.3, which clips gradients that are divided by N already at N^-1/2 thr_G;
  // here they are means, hence N^1/2.
  double local_clip() const {
    return config_.compress.clip > 0 ? config_.compress.clip * std::sqrt(communicator_.size())
                                     : config_.train.clip_local;
  }

  // Returns this rank's loss, the mean over its micro-batches.
  double forward_and_backward(StepRecord& record) {
    arena_.clear_gradients();
    const int parts = config_.train.accumulate;
    const double clip_norm = local_clip();
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
        Stopwatch watch(record.data_s);
        const StepTrace::Span span(trace_, TraceRow::compute, "data");
        TOPKNOT_CHECK(train_loader_.next(batch), "an epoch has fewer batches than its steps");
      }
      Variable part_loss;
      {
        Stopwatch watch(record.forward_s);
        const StepTrace::Span span(trace_, TraceRow::compute, "forward");
        ForwardContext context;
        context.seed = config_.seed;
        context.rank = static_cast<std::uint32_t>(communicator_.rank());
        context.step = static_cast<std::uint32_t>(step_ * parts + part);
        part_loss = batch_loss(model_->module->forward(Variable(batch.images), context), batch);
      }
      loss += part_loss.value().data()[0] / parts;
      Stopwatch watch(record.backward_s);
      backward_begin_ = Clock::now();
      const StepTrace::Span span(trace_, TraceRow::compute, "backward");
      backward(part_loss, part + 1 == parts && !clip_model ? hook : GradientHook{},
               1.0f / static_cast<float>(parts));
    }
    if (step_ == 0 && root_)
      for (const Parameter* parameter : arena_.zero_unwritten_gradients())
        log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
    if (clip_model) {
      const StepTrace::Span span(trace_, TraceRow::compute, "clip");
      arena_.zero_unwritten_gradients();
      for (const Parameter* parameter : arena_.parameters()) recorder_.take(*parameter);
      clip_gradients(arena_.parameters(), clip_norm);
      for (Parameter* parameter : arena_.parameters()) exchange_.ready(*parameter);
    }
    record.backward_s -= in_hooks;  // the exchange accounts for what happens there
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

  void update(StepRecord& record) {
    Stopwatch watch(record.update_s);
    const StepTrace::Span span(trace_, TraceRow::compute, "update");
    double factor = 1.0;
    if (config_.train.clip_global > 0) {
      double squares = 0;
      for (const Group& group : exchange_.groups()) squares += sum_of_squares(exchange_.averaged(group));
      factor = clip_factor(std::sqrt(squares), config_.train.clip_global);
    }
    for (const Group& group : exchange_.groups())
      optimizer_->update(group.begin, exchange_.averaged(group), record.lr, factor, exchange_.form(group));
  }

  void note_skip(const StepResult& result) {
    if (result.committed) {
      skips_in_a_row_ = 0;
      return;
    }
    ++skipped_;
    ++skips_in_a_row_;
    const std::string who = result.bad_rank >= 0 ? " on rank " + std::to_string(result.bad_rank) : "";
    reporter_.note("step " + std::to_string(step_) + " skipped by all ranks: NaN or infinity" + who);
    if (skips_in_a_row_ >= config_.train.max_skips)
      throw UserError(
          "training has diverged: " + std::to_string(skips_in_a_row_) +
          " steps in a row were not finite, the last at step " + std::to_string(step_) + who +
          "; lower optimizer.lr, or clip with train.clip_global (train.max_skips sets this limit)");
  }

  void run_evaluation() {
    const Clock::time_point start = Clock::now();
    synchronize_statistics(model_->store, config_.train.bn_stats, queue_, communicator_);
    evaluation_ = evaluate(*model_, test_loader_, queue_);
    reporter_.evaluation(step_, evaluation_, seconds_since(start), inputs_.data.test->classes() > 0);
  }

  void check_parameters(const std::string& when) {
    check_same_parameters(arena_, queue_, communicator_, when + ", step " + std::to_string(step_));
  }

  const RunInputs& inputs_;
  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  ExchangeChoice choice_;
  Exchange exchange_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Schedule> schedule_;
  Loader train_loader_, test_loader_;
  const Plan plan_;
  const std::vector<float> weights_;
  Reporter reporter_;
  Recorder recorder_;
  StepTrace trace_;

  std::vector<float> statistics_;     // as before this step
  Clock::time_point backward_begin_;  // of the pass that drives the exchange
  std::int64_t step_ = 0, skipped_ = 0;
  int skips_in_a_row_ = 0;
  Evaluation evaluation_;
};

}  // namespace

RunOutcome run_rank(const RunInputs& inputs, Communicator& communicator) {
  set_log_rank(communicator.rank(), communicator.size());
  omp_set_num_threads(compute_threads(inputs.config));
  Config shared = inputs.config;  // what must be the same everywhere; the rest may differ by host
  shared.output = {};
  shared.data.root.clear();
  shared.data.workers = 0;
  shared.dist.master.clear();
  shared.dist.interface.clear();
  check_same(communicator, "the program's version", program_version());
  check_same(communicator, "the configuration", dump_yaml(shared));
  return Trainer(inputs, communicator).run();
}

}  // namespace topknot
