#pragma once
// The output of a run: the start-up lines, progress on standard error, the records of metrics.jsonl, and
// TensorBoard's event file if asked for. Keeps the run's clock and the totals of the last record. Ranks other
// than 0 keep the totals too and write nothing.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "train/checkpoint/checkpoint.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"
#include "train/metrics/tensorboard.h"
#include "train/setup.h"
#include "train/step.h"

namespace topknot {

// Progress on standard error while a run goes on: on a terminal a bar that redraws itself and fits the width,
// elsewhere a plain line every `log_every` steps and ten seconds of an evaluation; none under --quiet.
struct ProgressOptions {
  std::int64_t total_steps = 0;  // 0: unknown
  int log_every = 10;
  bool quiet = false;
  std::string network = "";  // what the throughput depends on that is not real: "emulated link"
  const char* rate_unit = "images/s";
  std::int64_t every = 0;  // local steps: averages are over rounds of so many steps, of which one exchanges
};

// A part of the line. If that is too long, the parts of the highest rank go first; those of rank 0 stay.
struct ProgressField {
  std::string text;
  int rank;
};

class Progress {
 public:
  explicit Progress(ProgressOptions options);  // asks whether standard error is a terminal
  ~Progress();                                 // removes the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `step` counts from 1; `images` over all ranks; `step_seconds` this step's, for the throughput (moving
  // average) and the time left, to which `evaluation_seconds` are added: those of the evaluations to come. With local
  // steps no time left is shown before the first round ends.
  void step(std::int64_t step, double epoch, double loss, double lr, std::int64_t images, double step_seconds,
            double evaluation_seconds);
  // An evaluation has done so many of its batches in `seconds`; `later_seconds`: what comes after it.
  void evaluation(std::int64_t done, std::int64_t batches, double seconds, double later_seconds);
  // A line of its own (an evaluation, a warning) that does not run into the bar.
  void note(const std::string& text);
  void finish();
  double seconds_per_step() const { return seconds_per_step_; }  // moving average; 0: not known yet

 private:
  void show(std::vector<ProgressField> fields, double done);

  ProgressOptions options_;
  bool terminal_ = false;
  std::int64_t rounds_ = 0, round_steps_ = 0;  // whole ones seen by this start; steps of the one under way
  double round_seconds_ = 0, seconds_per_step_ = 0;
  double since_drawn_ = 1e9;     // step seconds since the bar was drawn
  double evaluation_shown_ = 0;  // seconds of this evaluation when it was shown last
};

// `total` 0 and `seconds_left` below 0: unknown.
std::vector<ProgressField> step_fields(std::int64_t step, std::int64_t total, double epoch, double loss,
                                       double lr, double images_per_second, double seconds_left,
                                       const char* rate_unit = "images/s");
// One line of at most `columns` (0: any), in front, if there is room, a bar for the share `done`, 0 to 1.
std::string progress_line(std::vector<ProgressField> fields, int columns = 0,
                          std::optional<double> done = std::nullopt);

class Reporter {
 public:
  using Clock = std::chrono::steady_clock;

  // `inputs` must outlive it.
  Reporter(const RunInputs& inputs, const Plan& plan, const Communicator& communicator);
  // Opens the run's files. `resumed`: of the checkpoint it goes on from. UserError if metrics.jsonl fails.
  void open(const Manifest& resumed);

  // The run in a few lines, before its first step, and what the data set warns of.
  // `made`: steps before this start.
  void announce(const Step& step, const RunData& data, std::int64_t made) const;
  // Once per density: what counts on the way, such as a threshold's, shows here only.
  void warn_of_more_than_dense(const StepRecord& record, const ByteCount& bytes);
  // The first step of this start begins, `step` were made before. `view`: as StartRecord has it.
  void begin(std::int64_t step, const std::string& view);

  // Fills in epoch, time, rates and the bytes: `bytes` is the sum over all ranks, the record has the mean.
  // The step took `seconds` to its `end`, which is not before that of the step before.
  void complete(StepRecord& record, const ByteCount& bytes, double seconds, Clock::time_point end);
  void step(const StepRecord& record, double seconds);
  void epoch(std::int64_t step, double train_loss) {
    if (metrics_) metrics_->write(EpochRecord{epochs(step), step, train_seconds_, train_loss});
  }
  // An evaluation after `step` steps has done so many of this rank's batches in `seconds`.
  void evaluating(std::int64_t step, std::int64_t done, std::int64_t batches, double seconds);
  void evaluation(std::int64_t step, const Evaluation& evaluation, double seconds);
  // Before end(), if the run has such a set.
  void held_out(const Evaluation& evaluation, double seconds) {
    held_out_ = evaluation;
    eval_seconds_ += seconds;
  }
  // Why a run that has made all its steps has failed, the same on every rank; "" if it has not.
  std::string divergence(const TrainingPosition& position) const;
  // `failure`: why the run has failed, "" if it has not. `modelled_makespan`: seconds, 0 if the run has no
  // exchange profile. `flops`: of a rank's step, 0 if not known. Returns the result of the run for its user,
  // two lines; "" on ranks other than 0. No stop() counts afterwards.
  std::string end(std::int64_t steps, std::int64_t skipped, const std::string& parameter_checksum,
                  const std::string& failure, double modelled_makespan, double flops);

  RunTotals totals() const { return {bytes_, train_seconds_, eval_seconds_}; }  // up to now
  // Length of metrics.jsonl; 0 on ranks other than 0
  std::uint64_t metrics_bytes() const { return metrics_ ? metrics_->bytes() : 0; }
  void stop(std::int64_t step, bool failed, const std::string& reason);  // this start ends before the run
  // A line between those of progress.
  void note(const std::string& text) {
    if (root_) progress_.note(text);
  }
  void finish() { progress_.finish(); }                // no more progress
  MetricsWriter* metrics() { return metrics_.get(); }  // null on ranks other than 0

 private:
  double epochs(std::int64_t step) const { return plan_.epochs(step); }
  std::int64_t images_per_step() const { return plan_.step_samples * labels_per_sample_; }
  std::int64_t images_in_step(std::int64_t step) const;     // from 1; fewer in an epoch's last one
  double evaluation_seconds(std::int64_t step) const;       // of the evaluations after this step, expected
  std::string evaluation_text() const;                      // of the last evaluation
  TestFigures figures(const Evaluation& evaluation) const;  // those of the run's task
  void note_best(const Evaluation& evaluation) {
    if (evaluation.loss < best_.loss) best_.loss = evaluation.loss;
    best_.accuracy = std::max(best_.accuracy, evaluation.accuracy);
  }
  void count(const StepRecord& record, const ByteCount& bytes, double seconds);
  void restore_totals(const Metrics& metrics, const Manifest& resumed);
  void put_bytes(const ByteCount& bytes, auto& record) const;

  const Config& config_;
  const RunDirectory folder_;
  const Plan plan_;
  const int ranks_;
  const std::string backend_;
  const bool root_;
  double warned_density_ = 0;  // of the last warn_of_more_than_dense()
  const std::string task_;     // as StartRecord has it
  const Metric metric_;
  const bool top5_;               // its second figure is top-5 accuracy
  const double bytes_per_token_;  // of the validation text; 0: not known, or no text
  const std::int64_t labels_per_sample_;
  const std::int64_t test_batches_;  // of an evaluation, on a rank
  Progress progress_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;  // with output.tensorboard, on rank 0

  const Clock::time_point program_start_;
  Clock::time_point first_step_;
  double startup_seconds_ = 0, train_seconds_ = 0, eval_seconds_ = 0;
  struct Seconds : StepSeconds {
    double step_s = 0;  // the whole
  };
  const std::size_t window_;      // steps, whole rounds of local ones
  std::vector<Seconds> seconds_;  // of the last steps, window_ of them and up to twice as many
  ByteCount bytes_;               // of all ranks and steps
  Evaluation last_;
  double last_eval_seconds_ = 0;                                 // 0: none was made yet
  Evaluation best_{std::numeric_limits<double>::infinity(), 0};  // least loss, greatest accuracy
  std::optional<Evaluation> held_out_;
  std::optional<double> density_;  // of the last step
  bool ended_ = false;
};

}  // namespace topknot
