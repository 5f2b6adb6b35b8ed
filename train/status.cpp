#include "train/run_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpoint.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"
#include "train/setup.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kRecentSteps = 50;

std::string state_of(const Metrics& metrics, const std::string& process) {
  if (!process.empty()) return "running, " + process;
  if (metrics.end) return metrics.end->failed ? "failed at its end: " + metrics.end->reason : "finished";
  if (metrics.stop && !metrics.stop->failed)
    return fmt::format("stopped by {} at {}", metrics.stop->reason, metrics.stop->time);
  if (metrics.stop) return fmt::format("failed at {}: {}", metrics.stop->time, metrics.stop->reason);
  return "not running; it ended without a word, as a killed process does";
}

std::string step_line(const Metrics& metrics) {
  if (metrics.steps.empty()) return "none was made yet";
  const StepRecord& last = metrics.steps.back();
  const std::int64_t total = metrics.starts.empty() ? 0 : metrics.starts.back().total_steps;
  return fmt::format("{}{}{}, loss {:.4g}", last.step, total > 0 ? fmt::format(" of {}", total) : "",
                     std::isfinite(last.epoch) ? fmt::format(", epoch {:.4g}", last.epoch) : "", last.loss);
}

// `every`: of local steps, of which one in a round exchanges; 0: none.
std::string speed_line(const Metrics& metrics, bool running, double eval_every, std::int64_t every) {
  std::size_t count = std::min(whole_rounds(kRecentSteps, every), metrics.steps.size());
  if (every > 0 && count > static_cast<std::size_t>(every)) count -= count % static_cast<std::size_t>(every);
  std::vector<double> rates;
  double seconds = 0;  // for one image of each step
  for (std::size_t i = metrics.steps.size() - count; i < metrics.steps.size(); ++i) {
    rates.push_back(metrics.steps[i].images_per_second);
    seconds += 1 / rates.back();
  }
  const StepRecord &first = metrics.steps[metrics.steps.size() - count], &last = metrics.steps.back();
  std::string line = fmt::format(
      "{} {}", short_text(every > 0 ? static_cast<double>(count) / seconds : quantile(rates, 0.5)),
      metrics.starts.empty() ? "images/s" : metrics.starts.back().metric.rate_unit());
  if (!running || count < 2 || metrics.starts.empty()) return line;
  const std::size_t earlier = metrics.steps.size() - count;
  const double since = earlier > 0 ? metrics.steps[earlier - 1].time_s : first.time_s;
  const double each = (last.time_s - since) / static_cast<double>(earlier > 0 ? count : count - 1);
  const StartRecord& start = metrics.starts.back();
  const double steps = each * static_cast<double>(std::max<std::int64_t>(0, start.total_steps - last.step));
  if (metrics.evals.empty())
    return line + fmt::format(", {} left without evaluations", format_duration(steps));
  const bool evaluated = metrics.evals.back().step == last.step;
  const std::int64_t evaluations = evaluations_left({start.steps_per_epoch, start.total_steps}, eval_every,
                                                    evaluated ? last.step : last.step - 1);
  return line + fmt::format(", {} left", format_duration(steps + metrics.evals.back().eval_seconds *
                                                                     static_cast<double>(evaluations)));
}

std::string checkpoint_line(const CheckpointStore& store, const std::vector<std::int64_t>& steps) {
  if (steps.empty()) return "none";
  const std::string path = store.path(steps.back());
  std::error_code error;
  double bytes = 0;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.is_regular_file(error))  // of another the size is an error, a number beyond any
      if (const std::uintmax_t size = entry.file_size(error); !error) bytes += static_cast<double>(size);
  const auto age = fs::file_time_type::clock::now() - fs::last_write_time(path, error);
  return fmt::format("step {}, {} ago, {}; {} kept", steps.back(),
                     format_duration(std::chrono::duration<double>(age).count()), format_bytes(bytes),
                     steps.size());
}

}  // namespace

std::string status_text(const std::string& run) {
  std::error_code error;
  if (!fs::exists(run + "/config.yaml", error))
    throw UserError(fmt::format("{} is no run directory: it has no config.yaml", run));
  const RunConfig config(run + "/config.yaml");
  const RunDirectory folder{run};
  // Runs of topknot.torch have not all keys, no last step and, unless they were told, no epochs.
  const auto number = [&](const char* key) { return config.find(key) ? config.number(key) : 0; };
  const auto every = static_cast<std::int64_t>(number("exchange.every"));
  const Metrics metrics = fs::exists(folder.metrics_jsonl(), error)
                              ? read_metrics(folder.metrics_jsonl(), 2 * whole_rounds(kRecentSteps, every))
                              : Metrics();
  const std::string process = running_process(run);
  const std::string backend =
      metrics.starts.empty() ? config.text("dist.backend") : metrics.starts.back().backend;
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("{:<11} {}\n", name, one_line(value));
  };
  line("run",
       fmt::format("{}: {}{}, {}, {} by {}", run, config.text("model.name"),
                   config.find("data.name") ? " on " + config.text("data.name") : "",
                   config.text("compress.name"),
                   count_text(static_cast<std::int64_t>(config.number("dist.ranks")), "rank"), backend));
  line("state", state_of(metrics, process));
  for (const StartRecord& start : metrics.starts)
    if (!start.view.empty()) line("ranks", start.view);
  line("step", step_line(metrics));
  if (!metrics.steps.empty())
    line("speed", speed_line(metrics, !process.empty(), number("train.eval_every"), every));
  if (!metrics.evals.empty()) {
    const EvalRecord& last = metrics.evals.back();
    Metric metric = metrics.starts.empty() ? Metric::accuracy() : metrics.starts.back().metric;
    if (metric.name.empty()) metric = Metric::accuracy();
    line("evaluation", fmt::format("after step {}: {} loss {:.4g}", last.step, metric.set, last.test.loss) +
                           (metric.name == "loss" ? ""
                                                  : fmt::format(", {} {}", metric.title(),
                                                                metric.text(metric.value(last.test)))));
  }
  const CheckpointStore store(folder.checkpoints());
  const std::vector<std::int64_t> saved = store.steps();
  line("checkpoint", checkpoint_line(store, saved));
  if (process.empty() && !metrics.end && !saved.empty()) line("go on with", "train --resume " + run);
  return text;
}

int status_command(int argc, const char* const* argv) {
  if (argc != 2 || argv[1][0] == '-')
    throw UserError("train status takes one run directory: train status runs/NAME");
  std::fputs(status_text(argv[1]).c_str(), stdout);
  return 0;
}

}  // namespace topknot
