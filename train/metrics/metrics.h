#pragma once
// metrics.jsonl: the record of a run, written by rank 0. One JSON object per line, appended and flushed at
// once; `event` names which of the records below it is, `rank` the rank that wrote it. metrics.csv is derived
// from it when a start of the run ends. Times are seconds. A time that starts at the first step excludes
// evaluation and start-up.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "nn/core/step.h"

namespace topknot {

// The first steps pay for caches and memory: rates and step times leave them out.
inline constexpr std::size_t kWarmUpSteps = 5;

// Values of one figure by step without those of the first kWarmUpSteps, unless there are no others. With
// local steps (every > 0) the means over whole rounds of `every` steps, each of which ends with its exchange,
// since a median of steps would leave the exchange out; without a whole round after the warm-up, the mean of
// all. NaN marks a step that was not measured and is left out.
std::vector<double> without_warm_up(const std::vector<double>& by_step, std::int64_t every);
// `steps` or a few more: whole rounds of `every` local steps; 0: no local steps.
inline std::size_t whole_rounds(std::int64_t steps, std::int64_t every) {
  const std::int64_t round = every > 0 ? every : 1;
  return static_cast<std::size_t>((steps + round - 1) / round * round);
}
// Drops the first `most` values, twice as many are kept at most: a bounded window of a long run.
template <class T>
void keep_last(std::vector<T>& values, std::size_t most) {
  if (values.size() >= 2 * most)
    values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(most));
}
// Their median; not a number if there are steps and none of them was measured.
double steady_median(const std::vector<double>& by_step, std::int64_t every);

// Bytes with and without compression, of one step or many, of one rank or all: the one definition that
// metrics and reports share. Counts the collectives' payload with blocks' headers, without framing.
struct ByteCount {
  std::uint64_t upload = 0;
  std::uint64_t download = 0;  // from all other ranks; an all-reduce counts its length once
  std::uint64_t dense = 0;     // what the same gradients take as floats: 4 d

  ByteCount& operator+=(const ByteCount& other) {
    upload += other.upload;
    download += other.download;
    dense += other.dense;
    return *this;
  }
  // The true ratio, dense / upload. 0 if nothing was sent.
  double ratio() const {
    return upload == 0 ? 0.0 : static_cast<double>(dense) / static_cast<double>(upload);
  }
  // Bits sent per parameter and step.
  double bits_per_parameter() const {
    return dense == 0 ? 0.0 : 32 * static_cast<double>(upload) / static_cast<double>(dense);
  }
};

// One training step. Numbers that belong to a rank (bytes, seconds) are the mean over ranks where the trainer
// has it, else rank 0's; bytes are counted as ByteCount defines. The parts of a step that were not measured are not a
// number, in the files null or empty.
struct StepRecord : StepSeconds {
  std::int64_t step = 0;  // 1 after the first step
  double epoch = 0;       // epochs done, with fraction
  double time_s = 0;      // since the first step began
  double loss = 0;        // mean over the ranks' batches, by shard weight
  double lr = 0;
  double density = 1;
  double selected = 0;  // entries that a rank sent
  double threshold = 0;
  double bytes_sent = 0;         // payload that one rank uploads in this step, headers included
  double bytes_received = 0;     // the same of its download: the messages of the other ranks
  double bytes_dense = 0;        // 4 per parameter
  double bytes_ratio = 0;        // dense over sent; 0 if nothing was sent
  bool skipped = false;          // some rank saw a NaN or Inf; nothing changed
  double images_per_second = 0;  // all ranks, this step; of a text: tokens
};

struct EpochRecord {
  double epoch = 0;  // epochs done
  std::int64_t step = 0;
  double time_s = 0;
  double train_loss = 0;  // mean over the epoch's steps, or over those since the number of ranks changed
};

// An evaluation's figures, in files with `test_` before each name. Figures that the task lacks are absent.
struct TestFigures {
  double loss = 0;
  std::optional<double> accuracy = {};  // 0 to 1, of classification; 1 - word_error_rate of transcription
  std::optional<double> top5_accuracy = {};  // 0 to 1, of classification in more than ten classes
  std::optional<double> perplexity = {};     // exp(loss) of a language model
  // loss / ln 2 / the mean bytes of text per token, if these are known (Dataset::bytes_per_token()).
  std::optional<double> bits_per_byte = {};
  std::optional<double> word_error_rate = {}, character_error_rate = {};  // of transcription
};

struct EvalRecord {
  std::int64_t step = 0;
  double epoch = 0;
  double time_s = 0;  // training time so far
  TestFigures test = {};
  double eval_seconds = 0;
};

// The figure that a run's evaluations measure; recorded, since values do not tell which it is.
struct Metric {
  // "accuracy", "loss", "perplexity" or "word error rate", as in TestFigures; "" in files of earlier versions
  std::string name;
  std::string unit;  // "share": 0 to 1, shown as percent; else the unit's name, shown after the title
  bool higher_is_better = true;
  std::string set = "test";  // which set the evaluations of a run read: test, or validation

  static Metric accuracy() { return {"accuracy", "share", true}; }
  static Metric squared_error() { return {"loss", "mean squared error", false}; }
  static Metric perplexity(const std::string& token = "word") {
    return {"perplexity", "per " + token, false, "validation"};
  }
  static Metric word_errors() { return {"word error rate", "share", false}; }
  bool operator==(const Metric&) const = default;

  // Computes the figure from an evaluation's mean loss and accuracy.
  double value(double loss, double accuracy) const;
  double value(const TestFigures& test) const { return value(test.loss, test.accuracy.value_or(0)); }
  // A second figure, "top-5 accuracy", "character error rate", "bits per byte" or "", and its value.
  const char* second() const;
  std::optional<double> second_value(const TestFigures& test) const;
  std::string title() const { return set + " " + name; }  // "test accuracy", "validation perplexity"
  std::string text(double value) const;                   // "87.43 %", "118.20", "4.4170"
  // The unit of images_per_second: "images/s", "tokens/s", "recordings/s"
  const char* rate_unit() const {
    return name == "perplexity" ? "tokens/s" : name == "word error rate" ? "recordings/s" : "images/s";
  }
};

// A start of the run: one, and one for each time that it was resumed, or that ranks died, left or joined.
struct StartRecord {
  std::int64_t step = 0;  // steps made before
  std::int64_t total_steps = 0, steps_per_epoch = 0;
  std::string time;          // UTC, 2026-11-22T03:50:00Z
  std::string backend = {};  // Communicator::backend(): "gloo", "threads, emulated link 100mbit, 50us"
  std::string task = {};     // "cifar10, 10 classes, samples [3, 32, 32]"; "" in files of earlier versions
  Metric metric = {};
  std::string revision = {};  // the program's (nn/base/program.h); "" in files of earlier versions
  std::string view = {};      // which ranks died, left and joined, and which go on; "" of another start
};

// A start that ended before the run's end, as far as rank 0 lived to write it.
struct StopRecord {
  std::int64_t step = 0;  // steps made
  bool failed = false;    // by an error; else by a signal or train.stop_after
  std::string reason, time;
};

// The histogram of a DistributionRecord spans [-kHistogramReach, kHistogramReach) standard deviations.
inline constexpr double kHistogramReach = 8;

// The distribution of rank 0's accumulated gradient u in one step (train.distribution_every), before what is
// sent leaves it; all groups as one vector of `size` elements.
struct DistributionRecord {
  std::int64_t step = 0;  // as in StepRecord
  double epoch = 0, density = 1;
  std::int64_t size = 0, k = 0;  // k = max(1, floor(density * size))
  double mean = 0, deviation = 0;
  double median = 0, laplace_scale = 0;  // mean |u - median|: the fit of a Laplace distribution
  // Counts of (u - mean) / deviation in equal bins, and outside of them.
  std::vector<std::int64_t> histogram;
  std::int64_t below = 0, above = 0;
  // Counts by floor(log2 |u|), from least_exponent up, the ends included in the outermost bins; and zeros.
  std::vector<std::int64_t> magnitudes;
  std::int64_t least_exponent = 0, zeros = 0;
  // ||u - TopK(u)||^2 / ||u||^2, exact; 0 if u is zero. Beside it the bounds of Shi et al., arXiv 1911.08772,
  // 1 - k/d and, for bell-shaped u, (1 - k/d)^2.
  double contraction = 0, bound = 0, bell_bound = 0;
};

// The last line of a run that came to its end.
struct EndRecord {
  TestFigures test = {};  // of the last evaluation; of a language model on the validation set
  std::optional<double> best_test_accuracy;  // where test.accuracy is
  // The figures of a set that is evaluated once, after the last step.
  std::optional<double> held_out_loss, held_out_perplexity;
  double wall_seconds = 0;       // first step to end, evaluation and start-up excluded
  double eval_seconds = 0;       // all evaluations
  double startup_seconds = 0;    // program start to first step
  double images_per_second = 0;  // all ranks (of a text: tokens), first kWarmUpSteps steps excluded
  // Floating-point operations of forward and backward passes as PassCost counts them, without those that a
  // backward pass repeats, of all ranks, in 1e12 a second; 0 if not known. And over ranks *
  // train.peak_tflops: the model FLOPs utilisation of Chowdhery et al., "PaLM" (arXiv 2204.02311, appendix B).
  double model_tflops = 0;
  std::optional<double> flops_utilisation;
  double bytes_sent = 0;      // totals: payload one rank uploads, mean over ranks
  double bytes_received = 0;  // the same of its download
  double bytes_dense = 0;     // 4 * d * steps
  double bytes_ratio = 0;     // dense over sent; 0 if nothing was sent
  double bits_per_parameter_step = 0;
  std::string parameter_checksum;  // 16 hexadecimal digits, parameters only
  std::int64_t steps = 0, skipped_steps = 0;
  bool failed = false;  // the training diverged, or its last checkpoint could not be written
  std::string reason;   // how it failed
  // Rates and quantiles of a run of more than 131,072 steps are of its last ones, at least 65,536.
  // Quantiles of the steps' figures, or with local steps of the rounds' means: without_warm_up(). Those after
  // the first two are 0 in files of earlier versions.
  double step_p50_s = 0, step_p95_s = 0;
  double encode_p50_s = 0, communicate_p50_s = 0, exposed_p50_s = 0, decode_p50_s = 0;
  double makespan_p50_s = 0;
  double modelled_makespan_s = 0;  // by the run's exchange profile; 0 if it has none
};

using MetricsRecord =
    std::variant<StepRecord, EpochRecord, EvalRecord, DistributionRecord, EndRecord, StartRecord, StopRecord>;

// Appends. Not a number and infinity become null. Throws UserError with path and reason if writing fails
// (disk full), and if the path no longer leads to the file (its folder was deleted or moved).
class MetricsWriter {
 public:
  // `check`, called before each record, throws if the run may write no more.
  explicit MetricsWriter(const std::string& path, int rank = 0, std::function<void()> check = {});
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const MetricsRecord& record);
  std::uint64_t bytes() const;  // of the file so far; throws as write() does where it is gone

 private:
  std::string path_;
  int rank_;
  std::function<void()> check_;
  std::FILE* file_ = nullptr;
  std::uint64_t device_ = 0, inode_ = 0;  // of the file
};

// A run as read back.
struct Metrics {
  std::vector<StepRecord> steps;
  std::vector<EpochRecord> epochs;
  std::vector<EvalRecord> evals;
  std::vector<DistributionRecord> distributions;
  std::vector<StartRecord> starts;
  std::optional<StopRecord> stop;  // of the last start
  std::optional<EndRecord> end;    // absent: the run is incomplete
  bool truncated = false;          // the last line was cut off (a killed run); it is left out
};

// Throws UserError: no such file, or a damaged line that is not the last (with its number). Unknown events
// and fields are passed over, so that newer files can be read; null reads as not a number.
// `last_steps`: of a long run keeps so many of its last steps, up to twice as many, and no distributions.
inline constexpr std::size_t kAllSteps = std::numeric_limits<std::size_t>::max() / 2;
Metrics read_metrics(const std::string& path, std::size_t last_steps = kAllSteps);

// Cuts metrics.jsonl off at `bytes`, a length it had earlier: what follows is done again by a resumed run.
// With a warning, a file that is shorter (records were lost with the machine) stays but for what no newline
// ends, one that is gone begins anew, and so does one with a damaged line, which is kept as
// metrics.jsonl.damaged. Throws UserError.
void truncate_metrics(const std::string& path, std::uint64_t bytes);

// One row per step, fixed columns, header once; evaluation columns are filled on the step that was evaluated,
// with the figures that the task has. Reads `jsonl` line by line. Throws UserError as read_metrics() does.
void write_metrics_csv(const std::string& jsonl, const std::string& path);

}  // namespace topknot
