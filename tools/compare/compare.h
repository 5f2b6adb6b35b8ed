#pragma once
// Several finished or interrupted runs side by side. Runs whose effective configuration differs in seed and
// output folder alone form one method; its numbers are means over its complete runs, with the sample
// deviation.
//
// All runs of a comparison have one task and one metric (train/metrics/metrics.h), whose best value, last
// value and time to a target are compared. Times are seconds of training (evaluation and start-up left out).

#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"

namespace topknot {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

// The parts of one step's time, in seconds. The parts from data to other add up to total.
struct StepTimes {
  double data = 0, forward = 0, backward = 0, encode = 0, exposed = 0, decode = 0, update = 0, other = 0;
  double total = 0;
  double hidden = 0;  // communication that ran during the computation; not part of total
};

// All of them, total first. `column`: as a file for programs names it; `head`: as a table does; `part`: as
// the palette does, null if it is no part of a bar.
struct StepPart {
  const char *column, *head, *part;
  double StepTimes::*seconds;
};
inline constexpr StepPart kStepParts[] = {
    {"step_s", "step", nullptr, &StepTimes::total},
    {"data_s", "data", "data", &StepTimes::data},
    {"forward_s", "forward", "forward", &StepTimes::forward},
    {"backward_s", "backward", "backward", &StepTimes::backward},
    {"encode_s", "encode", "encode", &StepTimes::encode},
    {"exposed_s", "exposed comm.", "exposed communication", &StepTimes::exposed},
    {"decode_s", "decode", "decode", &StepTimes::decode},
    {"update_s", "update", "update", &StepTimes::update},
    {"other_s", "other", "other", &StepTimes::other},
    {"hidden_s", "hidden comm.", nullptr, &StepTimes::hidden}};

struct Run {
  std::string path;
  RunConfig config;
  Metrics metrics;
  std::map<std::string, std::string> environment;  // host, cpu, ...; empty if the file is missing
  std::string task;     // as StartRecord has it; of files of earlier versions, by the data set
  Metric metric;        // the same
  std::string network;  // how the ranks talked: "gloo", "threads, emulated link 100mbit, 50us"
  bool complete() const { return metrics.end.has_value(); }

  // Derived once, when the run is read; kAbsent if unknown.
  bool diverged = false;                  // the last evaluation was not finite
  double best = kAbsent, last = kAbsent;  // of the metric; last is absent too where it was not finite
  double second = kAbsent;                // Metric::second(), in the last evaluation
  double held_out = kAbsent;              // of the set that is evaluated once, at the end
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
  // Unique: "topk", or with the keys in which it differs, "topk density=0.01", or where those are many, "topk
  // A".
  std::string name;
  std::string compressor;                     // compress.name
  std::string network;                        // of its runs
  std::map<std::string, std::string> config;  // every key of any run, without the seed and the output
  std::vector<std::size_t> runs;              // all of them
  std::vector<std::size_t> counted;           // the complete ones; all of them where none is
  bool complete = false;                      // at least one run is
  bool dense = false;
  // The dense method on as many ranks with the fewest other differences.
  std::optional<std::size_t> baseline;

  // last and held_out are absent if a run diverged: a mean of the others would hide it.
  Stat best, last, second, held_out, images_per_second, wall_seconds, bytes_per_step, received_per_step,
      seconds_to_target, steps_to_target;
  int reached = 0;                   // counted runs that met the target
  double dense_ratio = kAbsent;      // bytes_dense / bytes_sent
  double bits = kAbsent;             // sent per parameter and step
  double speed_up = kAbsent;         // images per second over the baseline's
  double target_speed_up = kAbsent;  // the baseline's time to the target over this one's
  StepTimes times;
};

struct DifferingKey {
  std::string key;
  std::vector<std::string> values;  // by method
};

// The meaning of a letter in the methods' names, or of a name itself.
struct Abbreviation {
  std::string text, keys;  // "A", "compress.density=0.01 exchange.merge=all"
};

struct Comparison {
  std::vector<Run> runs;
  std::vector<Method> methods;    // dense ones first, then as given
  std::vector<LineStyle> styles;  // by method
  std::vector<Abbreviation> abbreviations;
  std::string task;
  Metric metric;
  double target = kAbsent;  // value of the metric
  std::string target_reason;
  std::vector<DifferingKey> differing;
  std::vector<std::string> warnings;  // differences that make the comparison unfair
};

// Throws UserError: no such folder, no metrics.jsonl or config.yaml in it, a damaged line, no step in it yet,
// a metric that this version does not know.
Run read_run(const std::string& folder);

// The rows of a runs.csv that lab/train-runs wrote (lab/records/*.csv), as complete runs without steps
// and evaluations. The configuration of a run is its row's keys alone, its path the table's with the run's
// name after it. Throws UserError with the line: no such file, a column or compress.name missing, a value
// that is no number, a metric that this version does not know.
std::vector<Run> read_table(const std::string& path);

// Reads folders of runs, folders that hold such folders, and tables (.csv). Throws UserError if there is
// none.
std::vector<Run> read_runs(const std::vector<std::string>& arguments);

// `target`: value of the metric to measure the time to; by default 95 % of the best dense accuracy or 105 %
// of the least dense perplexity, or if no dense run is there, the worst of the methods' best; none for a
// loss. Throws UserError if tasks or metrics differ: their numbers have no common scale; and for a target if
// no run has evaluations.
Comparison compare_runs(std::vector<Run> runs, std::optional<double> target);

// Whether the key tells this method from another one of its compressor.
bool tells_apart(const Comparison& comparison, const DifferingKey& key, std::size_t method);
// " density=0.01": the last part of the key's name, and the method's value; "" if that is absent or the
// method's own choice.
std::string brief_key(const DifferingKey& key, std::size_t method);
bool has(const Comparison& comparison, Stat Method::*stat);       // some method has this figure
bool has_times(const Comparison& comparison);                     // of steps: runs of a table have none
bool reaches(const Metric& metric, double value, double target);  // as good as the target or better
std::string title_of(const Metric& metric);                       // "accuracy", "test loss"
std::string value_text(const Metric& metric, const Stat& stat);   // "87.4 ± 1.2 %", "0.05"; "-" if absent

// The network of all methods if they share it, else "".
std::string shared_network(const std::vector<Method>& methods);
// The link's description if the times come from an emulated link ("emulated link 100mbit, 50us"), in few
// words if the methods differ in it; else "".
std::string emulated_link(const std::vector<Method>& methods);

Table result_table(const Comparison& comparison);      // with the networks, where they differ
Table time_table(const Comparison& comparison);        // milliseconds per step, by part
Table difference_table(const Comparison& comparison);  // keys by methods
Table run_table(const Comparison& comparison);         // every run by itself

std::string comparison_text(const Comparison& comparison);  // what `compare` prints

// Everything that the page shows, for other programs; docs/compare.md has the columns. One row per method
// with plain numbers: seconds, bytes per step, shares from 0 to 1; each mean is followed by its sample
// deviation. Empty (JSON: null) if absent.
std::string comparison_csv(const Comparison& comparison);
std::string comparison_json(const Comparison& comparison);

// The drawings of the page, as HTML: each against training time, epoch and step, side by side.
std::string loss_chart(const Comparison& comparison);
std::string quality_chart(const Comparison& comparison);  // of the metric; "" if nothing was evaluated
std::string bytes_chart(const Comparison& comparison);
// The last value of the metric against the bits that a rank sends per parameter and step, means over complete
// runs: a point per method, joined if methods differ only in how much they send (density, threshold, rank,
// levels). "" if none was evaluated and sent something.
std::string bits_chart(const Comparison& comparison);
// The same as files by themselves; UserError in place of "". Of the epochs: that panel of quality_chart()
// alone, for runs whose times compare nothing.
std::string quality_svg(const Comparison& comparison);
std::string epochs_svg(const Comparison& comparison);
std::string bits_svg(const Comparison& comparison);

// The whole page, self-contained: no network, no script.
std::string report_html(const Comparison& comparison);
// The same of a results.json that `lab/netlab compare` wrote, whose "page" has the texts of its tables
// and the seconds of its bars. Throws UserError if it is none.
std::string lab_html(const std::string& path);

}  // namespace topknot
