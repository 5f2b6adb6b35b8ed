// The runs and replays that a prediction rests on and is compared with.

#include <fmt/format.h>

#include <filesystem>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "tools/predict/predict.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

double median_of(const Metrics& metrics, double (*figure)(const StepRecord&)) {
  std::vector<double> values;
  for (std::size_t i = kWarmUpSteps; i < metrics.steps.size(); ++i)
    if (!metrics.steps[i].skipped) values.push_back(figure(metrics.steps[i]));
  return quantile(values, 0.5);
}

// The recorded seconds of a replay in place of a training step: parameters become ready in proportion to
// their elements, as in bench.
ExchangeProfile replayed(ExchangeProfile profile, double compute) {
  profile.data_s = profile.forward_s = profile.update_s = 0;
  profile.backward_s = compute;
  double all = 0, ready = 0;
  for (const auto& parameter : profile.parameters) all += static_cast<double>(parameter.numel);
  for (auto& parameter : profile.parameters) {
    parameter.backward_s = compute * static_cast<double>(parameter.numel) / all;
    parameter.ready_s = ready += parameter.backward_s;
  }
  return profile;
}

}  // namespace

ExchangeProfile read_predictable(const std::string& run) {
  std::error_code error;
  if (!fs::exists(run, error)) throw UserError(run + ": no such run directory");
  if (!fs::is_directory(run, error)) return read_exchange_profile(run);
  const std::string file = run + "/exchange_profile.json";
  if (!fs::exists(file, error))
    throw UserError(run +
                    ": no exchange_profile.json in it. A run measures one when its merge plan or its "
                    "collective depends on it: train FILE.yaml dist.ranks=4 dist.backend=gloo "
                    "exchange.merge=optimal");
  return read_exchange_profile(file);
}

MeasuredRun read_measured(const std::string& folder) {
  std::error_code error;
  for (const char* name : {"metrics.jsonl", "config.yaml"})
    if (!fs::exists(folder + "/" + name, error))
      throw UserError("--measured: " + folder + ": no " + name +
                      " in it; give the folder of a run, or what bench --replay wrote to --out");
  const RunConfig config(folder + "/config.yaml");
  const Metrics metrics = read_metrics(folder + "/metrics.jsonl");
  if (metrics.steps.size() <= kWarmUpSteps + 1)
    throw UserError(
        fmt::format("--measured: {}: {} steps are too few, the first {} are warm-up; let it run for longer",
                    folder, metrics.steps.size(), kWarmUpSteps));
  MeasuredRun run;
  run.path = folder;
  run.method = config.text("compress.name");
  if (run.method != "dense" && config.find("compress.density"))
    run.density = config.number("compress.density");
  run.merge = config.text("exchange.merge");
  run.collective = config.text("exchange.collective");
  run.ranks = static_cast<int>(config.number("dist.ranks"));
  for (const double count : config.numbers("exchange.groups"))
    run.groups.push_back(static_cast<std::size_t>(count));
  run.replay = fs::exists(folder + "/bench.json", error);
  run.communicate = median_of(metrics, [](const StepRecord& s) { return s.communicate_s; });
  run.exposed = median_of(metrics, [](const StepRecord& s) { return s.exposed_s; });
  if (run.replay) run.compute = median_of(metrics, [](const StepRecord& s) { return s.backward_s; });
  std::vector<double> steps;
  for (std::size_t i = kWarmUpSteps; i < metrics.steps.size(); ++i)
    steps.push_back(metrics.steps[i].time_s - metrics.steps[i - 1].time_s);
  run.step = quantile(steps, 0.5);
  return run;
}

Judgement judge(const MeasuredRun& run, const std::vector<ExchangeProfile>& profiles,
                const PredictedNetwork& network) {
  const ExchangeProfile* best = nullptr;
  for (const ExchangeProfile& profile : profiles)
    if (!best && profile.method == run.method && profile.density == run.density.value_or(profile.density))
      best = &profile;
  if (!best && run.method == "dense") best = &profiles.at(0);
  if (!best)
    throw UserError("--measured: " + run.path + ": no run given was profiled with method " + run.method +
                    (run.density ? " at density " + short_text(*run.density) : "") +
                    "; encoding costs are known of profiled methods only, so give such a run too");
  ExchangeProfile profile = run.method == "dense" ? dense_profile(*best) : *best;
  if (run.replay) profile = replayed(profile, run.compute);
  PredictSetting setting;
  setting.ranks = run.ranks;
  setting.network = network;
  setting.merge = run.merge;
  setting.collective = run.collective;
  setting.groups = run.groups;
  return {run, predict(profile, setting)};
}

}  // namespace topknot
