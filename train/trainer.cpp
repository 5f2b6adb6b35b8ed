#include "train/trainer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "compress/byte_count.h"
#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "nn/core/base/program.h"
#include "nn/core/base/stopwatch.h"
#include "train/agreement.h"
#include "train/engine.h"
#include "train/reporter.h"

namespace topknot {
namespace {

using Clock = std::chrono::steady_clock;

// One rank's loop over epochs and steps, and what is reported of them.
class Trainer {
 public:
  Trainer(const RunInputs& inputs, Communicator& communicator)
      : inputs_(inputs),
        config_(inputs.config),
        communicator_(communicator),
        root_(communicator.rank() == 0),
        engine_(parse_device(config_.train.device).kind == DeviceKind::cuda
                    ? make_cuda_engine(inputs, communicator)
                    : make_cpu_engine(inputs, communicator)),
        schedule_(make_schedule(schedule_options(config_), config_.optimizer.lr)),
        plan_(plan_steps(config_, engine_->train_loader())),
        weights_(engine_->train_loader().weights()),
        reporter_(inputs, plan_, communicator) {}

  RunOutcome run() {
    reporter_.announce(communicator_, *engine_);
    check_parameters("at the start");
    reporter_.begin();
    last_report_ = Clock::now();
    int stopped = 0;  // the signal
    std::int64_t epoch = 0;
    while (step_ < plan_.total_steps && !stopped && !target_reached()) {
      stopped = run_epoch(epoch++);
      if (stopped || target_reached()) break;
      const bool last = step_ >= plan_.total_steps;
      if (last || evaluation_due()) run_evaluation();
    }
    check_parameters("at the end");
    engine_->finish();
    reporter_.finish();
    RunOutcome outcome{stopped, evaluation_.accuracy, evaluation_.loss, engine_->checksum()};
    if (stopped) {
      log_info("stopped by " + signal_name(stopped) + " after step " + std::to_string(step_) + "; " +
               inputs_.folder.path + " has the steps so far");
      return outcome;
    }
    reporter_.end(step_, skipped_, outcome.parameter_checksum, engine_->modelled_makespan());
    return outcome;
  }

 private:
  // The signal that stops the run, or 0.
  int run_epoch(std::int64_t epoch) {
    engine_->start_epoch(epoch);
    epoch_loss_ = 0;
    std::int64_t steps = 0;
    for (; steps < plan_.steps_per_epoch && step_ < plan_.total_steps; ++steps) {
      make_step(epoch);
      const bool epoch_goes_on = steps + 1 < plan_.steps_per_epoch && step_ < plan_.total_steps;
      const bool check = config_.train.check_every > 0 && step_ % config_.train.check_every == 0;
      const bool evaluation = epoch_goes_on && evaluation_due();  // at its end: once the epoch is reported
      const bool due = check || evaluation || !epoch_goes_on ||
                       static_cast<std::int64_t>(pending_.size()) >= engine_->steps_ahead();
      if (!due) continue;
      const int stop = report();
      if (check) check_parameters("during training");
      if (stop) return stop;
      if (evaluation) run_evaluation();
      if (target_reached()) return 0;
    }
    reporter_.epoch(step_, epoch_loss_ / static_cast<double>(steps));
    return 0;
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

  void make_step(std::int64_t epoch) {
    if (pending_.empty()) last_report_ = Clock::now();
    StepRecord record;
    record.lr = schedule_->lr(step_, plan_.steps_per_epoch, plan_.total_steps);
    record.density =
        config_.compress.name == "dense" ? 1.0 : density_at_epoch(config_, static_cast<int>(epoch));
    engine_->step({step_, record.density, record.lr});
    record.step = ++step_;
    pending_.push_back(record);
  }

  // Reports the steps made since the last report. One small sum over the ranks for all of them: their metrics, and
  // how many ranks have received each of the signals that ask for a stop. Returns the highest of these signals, the
  // same on every rank, or 0.
  int report() {
    const std::vector<StepStats> stats = engine_->stats();
    TOPKNOT_CHECK(stats.size() == pending_.size(), "one set of statistics per step");
    // The loss counts as the rank's gradient does, by the weight of its shard.
    const double weight = weights_[static_cast<std::size_t>(communicator_.rank())];
    constexpr std::size_t kSums = 4;
    std::vector<double> sums;
    for (const StepStats& step : stats)
      for (const double value :
           {step.loss * weight, static_cast<double>(step.bytes_sent),
            static_cast<double>(step.bytes_received), static_cast<double>(step.selected)})
        sums.push_back(value);
    const int signal_here = stop_signal();
    for (const int signal : kStopSignals) sums.push_back(signal == signal_here ? 1.0 : 0.0);
    engine_->all_reduce(sums);
    const double seconds = seconds_since(last_report_) / static_cast<double>(stats.size());
    const double ranks = communicator_.size();
    for (std::size_t i = 0; i < stats.size(); ++i) {
      const double* sum = sums.data() + i * kSums;
      StepRecord record = stats[i].times;
      record.step = pending_[i].step, record.lr = pending_[i].lr, record.density = pending_[i].density;
      record.loss = sum[0] / ranks;
      const ByteCount bytes{
          static_cast<std::uint64_t>(sum[1]), static_cast<std::uint64_t>(sum[2]),
          static_cast<std::uint64_t>(communicator_.size()) * sizeof(float) * engine_->arena().size()};
      record.selected = sum[3] / ranks;
      record.threshold = stats[i].threshold;
      record.skipped = !stats[i].committed;
      reporter_.complete(record, bytes, seconds);
      note_skip(record.step, stats[i]);
      reporter_.step(record, seconds);
      engine_->end_step(record, root_ ? reporter_.metrics() : nullptr);
      epoch_loss_ += record.loss;
    }
    pending_.clear();
    int stop = 0;
    for (std::size_t i = 0; i < std::size(kStopSignals); ++i)
      if (sums[stats.size() * kSums + i] > 0) stop = std::max(stop, kStopSignals[i]);
    return stop;
  }

  void note_skip(std::int64_t step, const StepStats& stats) {
    if (stats.committed) {
      skips_in_a_row_ = 0;
      return;
    }
    ++skipped_;
    ++skips_in_a_row_;
    const std::string who = stats.bad_rank >= 0 ? " on rank " + std::to_string(stats.bad_rank) : "";
    reporter_.note("step " + std::to_string(step) + " skipped by all ranks: NaN or infinity" + who);
    if (skips_in_a_row_ >= config_.train.max_skips)
      throw UserError(
          "training has diverged: " + std::to_string(skips_in_a_row_) +
          " steps in a row were not finite, the last at step " + std::to_string(step) + who +
          "; lower optimizer.lr, or clip with train.clip_global (train.max_skips sets this limit)");
  }

  void run_evaluation() {
    const Clock::time_point start = Clock::now();
    evaluation_ = engine_->evaluate();
    reporter_.evaluation(step_, evaluation_, seconds_since(start), inputs_.data.test->classes() > 0);
  }

  void check_parameters(const std::string& when) {
    engine_->check_parameters(when + ", step " + std::to_string(step_));
  }

  const RunInputs& inputs_;
  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Schedule> schedule_;
  const Plan plan_;
  const std::vector<float> weights_;
  Reporter reporter_;

  std::int64_t step_ = 0, skipped_ = 0;  // step_: made, of which pending_ are not reported
  std::vector<StepRecord> pending_;
  Clock::time_point last_report_;  // or when the first pending step began
  double epoch_loss_ = 0;          // sum over the epoch's steps
  int skips_in_a_row_ = 0;
  Evaluation evaluation_;
};

}  // namespace

RunOutcome run_rank(const RunInputs& inputs, Communicator& communicator) {
  set_log_rank(communicator.rank(), communicator.size());
  omp_set_num_threads(compute_threads(inputs.config));
  check_same_configuration(communicator, inputs.config);
  check_same_data(communicator, inputs.data);
  return Trainer(inputs, communicator).run();
}

}  // namespace topknot
