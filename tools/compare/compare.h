#pragma once
// Several finished or interrupted runs side by side. Runs whose effective configuration differs in seed and
// output folder alone form one method; its numbers are means over its complete runs, with the sample
// deviation.
//
// Accuracy is 0 to 1, times are seconds of training (evaluation and start-up left out). Data sets without
// classes have no accuracy: there the test loss takes its place and there is no time to accuracy.

#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/table.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"

namespace topknot {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

// The parts of one step's time, in seconds. The parts from data to other add up to total.
struct StepTimes {
  double data = 0, forward = 0, backward = 0, encode = 0, exposed = 0, decode = 0, update = 0, other = 0;
  double total = 0;
  double hidden = 0;  // communication that ran beside the computation; not part of total
};

struct Run {
  std::string path;
  RunConfig config;
  Metrics metrics;
  std::map<std::string, std::string> environment;  // host, cpu, ...; empty where the file is missing
  bool complete() const { return metrics.end.has_value(); }

  // Derived once by read_run; kAbsent where unknown.
  double best = kAbsent, last = kAbsent;  // accuracy, or loss where there is none
  double images_per_second = kAbsent;
  double wall_seconds = kAbsent;
  double bytes_sent = 0, bytes_dense = 0;  // totals so far
  double bytes_received = kAbsent;         // absent from files of earlier versions
  std::vector<double> sent_so_far;         // by step record, running total
  StepTimes times;
};

struct Stat {
  double mean = kAbsent;
  double deviation = 0;  // of a sample; 0 with one value
  int count = 0;
};
Stat stat_of(const std::vector<double>& values);  // absent values are left out

// Runs of one configuration.
struct Method {
  std::string name;  // unique: "topk", or with the keys in which it differs, "topk density=0.01"
  std::map<std::string, std::string> config;  // every key of any run, without the seed and the output
  std::vector<std::size_t> runs;              // all of them
  std::vector<std::size_t> counted;           // the complete ones; all of them where none is
  bool complete = false;                      // at least one run is
  bool dense = false;
  std::optional<std::size_t> baseline;  // the dense method with the fewest other differences

  Stat best, last, images_per_second, wall_seconds, bytes_per_step, received_per_step, seconds_to_target;
  int reached = 0;                   // counted runs that met the target
  double dense_ratio = kAbsent;      // bytes_dense / bytes_sent
  double speed_up = kAbsent;         // images per second over the baseline's
  double target_speed_up = kAbsent;  // the baseline's time to the target over this one's
  StepTimes times;
};

struct DifferingKey {
  std::string key;
  std::vector<std::string> values;  // by method
};

struct Comparison {
  std::vector<Run> runs;
  std::vector<Method> methods;  // dense ones first, then as given
  bool has_accuracy = false;
  double target = kAbsent;  // accuracy
  std::string target_reason;
  std::vector<DifferingKey> differing;
  std::vector<std::string> warnings;  // differences that make the comparison unfair
};

// Throws UserError: no such folder, no metrics.jsonl or config.yaml in it, a damaged line, no step in it yet.
Run read_run(const std::string& folder);

// Folders of runs, or folders that hold such folders; throws UserError where there is none.
std::vector<std::string> find_runs(const std::vector<std::string>& arguments);

// `target`: accuracy to measure the time to; by default 95 % of the best dense accuracy, or where no dense
// run is there, the lowest of the methods' best.
Comparison compare_runs(std::vector<Run> runs, std::optional<double> target);

Table result_table(const Comparison& comparison);
Table time_table(const Comparison& comparison);        // milliseconds per step, by part
Table difference_table(const Comparison& comparison);  // keys by methods
Table run_table(const Comparison& comparison);         // every run by itself

std::string comparison_text(const Comparison& comparison);  // what `compare` prints

// One row per method with plain numbers, for other programs: seconds, bytes per step, accuracies from 0 to 1; each
// mean is followed by its sample deviation. Empty where absent. The first row has the names.
std::string comparison_csv(const Comparison& comparison);

// The whole page, self-contained: no network, no script.
std::string report_html(const Comparison& comparison);

// "0.874 ± 0.012" as "87.4 ± 1.2 %"; "-" where absent.
std::string percent_text(const Stat& stat);

}  // namespace topknot
