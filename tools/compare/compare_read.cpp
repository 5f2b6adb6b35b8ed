// Run directories, read.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> read_environment(const std::string& path) {
  std::map<std::string, std::string> result;
  using Json = nlohmann::json;
  constexpr std::size_t kMostBytes = 16 << 20;
  std::error_code error;
  if (!fs::exists(path, error)) return result;
  // What is nested deeper than a run writes is left out: dump() calls itself.
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const auto json = Json::parse(read_text_file(path, kMostBytes), shallow, false);
  if (!json.is_object()) return result;
  for (const auto& [name, value] : json.items())
    result[name] = value.is_string() ? value.get<std::string>()
                                     : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return result;
}

// Seconds of one step at record i; a file may hold every n-th step only.
double step_seconds(const std::vector<StepRecord>& steps, std::size_t i) {
  const double time_before = i ? steps[i - 1].time_s : 0;
  const auto step_before = i ? steps[i - 1].step : 0;
  const auto count = std::max<std::int64_t>(1, steps[i].step - step_before);
  return std::max(0.0, steps[i].time_s - time_before) / static_cast<double>(count);
}

StepTimes mean_times(const std::vector<StepRecord>& steps) {
  StepTimes sum;
  double count = 0;
  for (std::size_t i = steps.size() > 2 * kWarmUpSteps ? kWarmUpSteps : 0; i < steps.size(); ++i) {
    const StepRecord& s = steps[i];
    const double parts =
        s.data_s + s.forward_s + s.backward_s + s.encode_s + s.exposed_s + s.decode_s + s.update_s;
    const double total = std::max(parts, step_seconds(steps, i));
    if (!std::isfinite(total)) continue;
    sum.data += s.data_s, sum.forward += s.forward_s, sum.backward += s.backward_s, sum.encode += s.encode_s;
    sum.exposed += s.exposed_s, sum.decode += s.decode_s, sum.update += s.update_s;
    sum.other += total - parts;
    sum.total += total;
    sum.hidden += std::max(0.0, s.communicate_s - s.exposed_s);
    ++count;
  }
  if (count == 0) return sum;
  for (double* part : {&sum.data, &sum.forward, &sum.backward, &sum.encode, &sum.exposed, &sum.decode,
                       &sum.update, &sum.other, &sum.total, &sum.hidden})
    *part /= count;
  return sum;
}

// Samples over time, as the record of a run's end has it.
double mean_rate(const std::vector<StepRecord>& steps) {
  double count = 0, seconds_per_image = 0;
  for (std::size_t i = steps.size() > kWarmUpSteps ? kWarmUpSteps : 0; i < steps.size(); ++i)
    if (const double rate = steps[i].images_per_second; std::isfinite(rate) && rate > 0)
      ++count, seconds_per_image += 1 / rate;
  return count == 0 ? kAbsent : count / seconds_per_image;
}

void derive(Run& run) {
  const Metrics& m = run.metrics;
  for (const EvalRecord& eval : m.evals) {
    const double value = run.metric.value(eval.test);
    if (!std::isfinite(value)) {
      run.last = kAbsent;
      continue;
    }
    run.last = value;
    if (const double second = run.metric.second_value(eval.test).value_or(0); second > 0) run.second = second;
    if (std::isnan(run.best) || reaches(run.metric, value, run.best)) run.best = value;
  }
  std::int64_t before = 0;
  double received = 0;
  for (const StepRecord& step : m.steps) {
    const auto count = static_cast<double>(std::max<std::int64_t>(1, step.step - before));
    before = step.step;
    run.bytes_sent += count * step.bytes_sent;
    run.bytes_dense += count * step.bytes_dense;
    received += count * step.bytes_received;
    run.sent_so_far.push_back(run.bytes_sent);
  }
  run.times = mean_times(m.steps);
  run.images_per_second = mean_rate(m.steps);
  run.wall_seconds = m.steps.back().time_s;
  if (m.end) {
    if (run.metric.name == "accuracy") {
      run.last = m.end->test.accuracy.value_or(run.last);
      run.best = m.end->best_test_accuracy.value_or(run.best);
    }
    if (const double loss = m.end->held_out_loss.value_or(0); loss > 0)
      run.held_out = run.metric.value(loss, 0);
    run.images_per_second = m.end->images_per_second;
    run.wall_seconds = m.end->wall_seconds;
    run.bytes_sent = m.end->bytes_sent;
    run.bytes_dense = m.end->bytes_dense;
    received = m.end->bytes_received;
  }
  if (received > 0 || run.config.number("dist.ranks") == 1) run.bytes_received = received;
  run.diverged = !m.evals.empty() && std::isnan(run.last);
}

// Task and metric of a run whose files are of a version that did not record them. Its data set tells: the values do not.
void read_unrecorded_task(Run& run) {
  const std::string data = run.config.text("data.name");
  const auto key = [&](const char* name, const char* standard) {
    const std::string value = run.config.text(name);
    return value.empty() || value == "0" ? standard : value;  // 0: the data set's own
  };
  run.metric = data == "synthetic_regression" ? Metric::squared_error() : Metric::accuracy();
  run.task = data;
  if (data == "cifar10") run.task += ", 10 classes, samples [3, 32, 32]";
  if (data == "mnist") run.task += ", 10 classes, samples [1, 28, 28]";
  if (data == "synthetic_regression") run.task += ", 1 target, samples [64, 1, 1]";
  if (data == "synthetic_images")
    run.task += fmt::format(", {0} classes, samples [3, {1}, {1}]", key("data.classes", "10"),
                            key("data.image_size", "32"));
}

void read_start(Run& run) {
  run.network = run.config.text("dist.backend");
  for (const StartRecord& start : run.metrics.starts) {
    if (!start.backend.empty()) run.network = start.backend;
    if (!start.metric.name.empty()) run.task = start.task, run.metric = start.metric;
  }
  if (run.metric.name.empty()) read_unrecorded_task(run);
  if (run.metric.name != "accuracy" && run.metric.name != "loss" && run.metric.name != "perplexity" &&
      run.metric.name != "word error rate")
    throw UserError(
        fmt::format("{}: its metric is '{}', and this version compares accuracy, loss, perplexity and word "
                    "error rate only; "
                    "use the compare "
                    "of the version that trained it",
                    run.path, run.metric.name));
}

// Folders of runs, or folders that hold such folders.
std::vector<std::string> find_runs(const std::vector<std::string>& arguments) {
  std::vector<std::string> runs;
  for (std::string argument : arguments) {
    while (argument.size() > 1 && argument.back() == '/') argument.pop_back();
    std::error_code error;
    if (!fs::is_directory(argument, error))
      throw UserError(argument + ": no such run directory; 'train' writes them, to output.dir or runs/");
    if (fs::exists(fs::path(argument) / "metrics.jsonl", error)) {
      runs.push_back(argument);
      continue;
    }
    std::vector<std::string> inside;
    for (const auto& entry : fs::directory_iterator(argument, error))
      if (fs::exists(entry.path() / "metrics.jsonl", error)) inside.push_back(entry.path().string());
    if (error || inside.empty())
      throw UserError(argument +
                      ": no metrics.jsonl in it, so this is no run directory (nor a folder of runs)");
    std::sort(inside.begin(), inside.end());
    runs.insert(runs.end(), inside.begin(), inside.end());
  }
  std::vector<std::string> unique;
  std::set<fs::path> known;
  for (const auto& run : runs)
    if (known.insert(fs::canonical(run)).second) unique.push_back(run);
  return unique;
}

}  // namespace

std::vector<Run> read_runs(const std::vector<std::string>& arguments) {
  std::vector<Run> runs;
  std::vector<std::string> folders;
  std::set<fs::path> tables;
  for (const std::string& argument : arguments) {
    std::error_code error;
    if (!argument.ends_with(".csv") || fs::is_directory(argument, error)) {
      folders.push_back(argument);
    } else if (tables.insert(fs::weakly_canonical(argument, error)).second) {
      for (Run& run : read_table(argument)) runs.push_back(std::move(run));
    }
  }
  if (!tables.empty() && !folders.empty())
    throw UserError("a table of runs and a run directory (" + folders[0] +
                    ") cannot stand side by side: a table does not have the whole configuration of its runs");
  for (const std::string& folder : find_runs(folders)) runs.push_back(read_run(folder));
  return runs;
}

Run read_run(const std::string& folder) {
  Run run;
  run.path = folder;
  std::error_code error;
  if (!fs::is_directory(folder, error)) throw UserError(folder + ": no such run directory");
  if (!fs::exists(folder + "/metrics.jsonl", error))
    throw UserError(folder + ": no metrics.jsonl in it, so this is no run directory");
  if (!fs::exists(folder + "/config.yaml", error))
    throw UserError(folder + ": no config.yaml in it; the configuration is needed to compare the run");
  run.config = RunConfig(folder + "/config.yaml");
  if (run.config.text("compress.name").empty())
    throw UserError(folder + "/config.yaml: no compress.name in it, so it is not the configuration of a run");
  run.metrics = read_metrics(folder + "/metrics.jsonl");
  if (run.metrics.steps.empty())
    throw UserError(folder + ": the run has not finished a step yet; there is nothing to compare");
  run.environment = read_environment(folder + "/environment.json");
  read_start(run);
  derive(run);
  return run;
}

}  // namespace topknot
