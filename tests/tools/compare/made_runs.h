#pragma once
// Run directories made by hand, as the tests of compare read them.

#include <optional>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "tools/compare/compare.h"
#include "train/run_directory.h"

namespace topknot::testing {

inline std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Run directories with plain numbers: every step takes `step_seconds`, the accuracy rises to `best` and falls
// by 0.01 at the end.
struct Made {
  std::vector<std::string> overrides = {};
  double step_seconds = 0.1;
  double best = 0.8;
  double bytes = 4000;
  bool complete = true;
  std::optional<Metric> metric = Metric::accuracy();  // none: files of a version that did not record it
  int steps = 20, every = 1;                          // every so many steps are in the file
  std::string network = "threads";
  std::string task = "synthetic_images, 10 classes, samples [3, 32, 32]";
  double held_out_loss = 0;
  double second = 0;      // Metric::second() in the first evaluation, 0.1 less in each later one; 0: none
  bool diverges = false;  // the last evaluation's loss is not a number
  bool slower = false;    // step i's forward pass takes i milliseconds
  int measured = 1;       // every so many steps have their parts measured; 0: none
};

struct Folder {
  std::string add(const std::string& name, const Made& made) const {
    auto overrides = made.overrides;
    overrides.push_back("output.dir=" + path + "/" + name);
    const auto loaded = load_config("", overrides);
    REQUIRE(loaded.problems.empty());
    const RunDirectory folder = create_run_directory(loaded, {"train"});
    MetricsWriter writer(folder.metrics_jsonl());
    if (made.metric)
      writer.write(
          StartRecord{0, made.steps, 10, "2026-01-01T00:00:00Z", made.network, made.task, *made.metric});
    const bool accuracy = !made.metric || made.metric->name == "accuracy";
    const int steps = made.steps;
    for (int i = 1; i <= steps; ++i) {
      StepRecord step;
      step.step = i, step.epoch = 0.1 * i, step.time_s = made.step_seconds * i, step.loss = 2.0 / i;
      step.bytes_sent = made.bytes, step.bytes_dense = 4000, step.images_per_second = 10 / made.step_seconds;
      step.forward_s = made.slower ? 0.001 * i : 0.02, step.backward_s = 0.03, step.communicate_s = 0.015,
      step.exposed_s = 0.01;
      if (made.measured == 0 || i % made.measured != 0)
        static_cast<StepSeconds&>(step) = StepSeconds::unknown();
      if (i % made.every == 0) writer.write(step);
      if (i % 5 != 0) continue;
      EvalRecord eval;
      eval.step = i, eval.epoch = step.epoch, eval.time_s = step.time_s,
      eval.test.loss = made.diverges && i == steps ? kAbsent : 1.0 / i;
      if (accuracy) eval.test.accuracy = i == steps ? made.best - 0.01 : made.best * i / 15;
      const double second = made.second - 0.02 * (i - 5);
      (accuracy                              ? eval.test.top5_accuracy
       : made.metric == Metric::perplexity() ? eval.test.bits_per_byte
                                             : eval.test.character_error_rate) = made.second > 0 ? second : 0;
      writer.write(eval);
    }
    if (made.complete) {
      EndRecord end;
      end.steps = steps, end.wall_seconds = made.step_seconds * steps, end.bytes_sent = made.bytes * steps;
      end.bytes_dense = 4000.0 * steps, end.images_per_second = 10 / made.step_seconds;
      end.held_out_loss = made.held_out_loss;
      if (accuracy) end.test.accuracy = made.best - 0.01, end.best_test_accuracy = made.best;
      end.parameter_checksum = "00000000deadbeef";
      writer.write(end);
    }
    return path + "/" + name;
  }

  Comparison compare(const std::vector<std::string>& names, std::optional<double> target = {}) const {
    std::vector<Run> runs;
    for (const auto& name : names) runs.push_back(read_run(path + "/" + name));
    return compare_runs(std::move(runs), target);
  }

  TempFolder temp;
  std::string path = temp.str();
};

inline const std::vector<std::string> kTopk = {"compress.name=topk"};

}  // namespace topknot::testing
