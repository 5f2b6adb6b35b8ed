#include "lab/predict/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"
#include "train/plan/plan.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

// The runs and replays that a prediction rests on and is compared with.

double median_of(const Metrics& metrics, std::int64_t every, double (*figure)(const StepRecord&)) {
  std::vector<double> values;
  for (const StepRecord& step : metrics.steps)
    if (every > 0 || !step.skipped) values.push_back(figure(step));
  return steady_median(values, every);
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

ExchangeProfile dense_profile(const ExchangeProfile& profile) {
  if (profile.is_dense() && !codes_sums(profile.collective)) return profile;
  ExchangeProfile dense = profile;
  dense.method = "dense";
  dense.options.clear();
  dense.density = 1;
  dense.collective = "all_gather";
  dense.sums = dense.dense_sums = true;
  dense.dense = {};
  double all = 0, least = 1e300;
  for (auto& parameter : dense.parameters) {
    parameter.compressed = false;
    all += static_cast<double>(parameter.numel);
    least = std::min(least, static_cast<double>(parameter.numel));
  }
  dense.groups = {{all, 4 * all, 0, 0, 0}};
  if (least < all) dense.groups.insert(dense.groups.begin(), {least, 4 * least, 0, 0, 0});
  // The sums of a compressed method are small and in rank order: a ring of the link's messages instead. The
  // greater of the two figures a byte, as small sums may not have filled the link.
  if (profile.ranks > 1) {
    const double share = 2.0 * (profile.ranks - 1) / profile.ranks;  // of the data, twice in each direction
    const double measured = codes_sums(profile.collective) ? 0 : profile.reduce.beta / share;
    dense.reduce = {2 * (profile.ranks - 1) * profile.link.alpha,
                    std::max(profile.link.beta, measured) * share, profile.ranks};
  }
  return dense;
}

PredictedNetwork parse_network_rate(const std::string& text) {
  PredictedNetwork network;
  network.name = text;
  if (text == "measured") return network;
  network.bits_per_s = parse_rate("--rate", text);
  return network;
}

std::vector<std::size_t> groups_by(const std::string& text, const ExchangeProfile& profile) {
  const bool one_group = profile.options.find("scope=model") != std::string::npos;
  const Merge merge = parse_merge(resolve_merge(text, !profile.is_dense(), one_group ? "model" : "group"));
  if (merge.planned()) return planned_groups(merge.name, profile);
  std::vector<std::size_t> groups;
  for (std::size_t next = 0; next < profile.parameters.size();) {
    std::vector<std::size_t> bytes;  // of what is compressed, then of the rest
    const bool compressed = profile.parameters[next].compressed;
    for (; next < profile.parameters.size() && profile.parameters[next].compressed == compressed; ++next)
      bytes.push_back(4 * profile.parameters[next].numel);
    for (const std::size_t count : merge.rule->cut(bytes, merge.limit)) groups.push_back(count);
  }
  return groups;
}

Prediction predict(const ExchangeProfile& profile, const PredictSetting& setting) {
  const ExchangeProfile at = profile_at(profile, setting.ranks, setting.network, setting.collective);
  Prediction p;
  p.method = at.method, p.density = at.density, p.merge = setting.merge, p.collective = at.collective;
  p.options = at.options;
  p.asked_collective = setting.collective;
  if (at.sums && !codes_sums(at.collective)) p.collective = at.is_dense() ? "ring" : "ordered_sum";
  p.ranks = setting.ranks, p.network = setting.network;
  p.data = at.data_s, p.forward = at.forward_s, p.backward = at.backward_s, p.update = at.update_s;
  const double alone = p.data + p.forward + p.backward + p.update;
  p.every = setting.every;
  if (setting.ranks == 1) {
    p.iteration = alone;
    return p;
  }
  const auto groups = setting.groups.empty() ? groups_by(setting.merge, at) : setting.groups;
  const StepModel step = modelled_step(at, groups, setting.every);
  p.groups = step.groups;
  p.encode = step.encode, p.decode = step.decode;
  p.communicate = step.communicate, p.exposed = step.exposed;
  p.iteration = step.seconds;
  p.speed_up = p.ranks * alone / p.iteration;
  p.efficiency = alone / p.iteration;
  return p;
}

double relative_error(double modelled, double measured) {
  return measured > 0 ? modelled / measured - 1 : std::nan("");
}

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
  if (config.find("compress.values")) run.values = config.text("compress.values");
  run.merge = config.text("exchange.merge");
  run.collective = config.text("exchange.collective");
  run.ranks = static_cast<int>(config.number("dist.ranks"));
  for (const double count : config.numbers("exchange.groups"))
    run.groups.push_back(static_cast<std::size_t>(count));
  run.replay = fs::exists(folder + "/bench.json", error);
  if (config.find("exchange.every")) run.every = static_cast<std::int64_t>(config.number("exchange.every"));
  run.communicate = median_of(metrics, run.every, [](const StepRecord& s) { return s.communicate_s; });
  run.exposed = median_of(metrics, run.every, [](const StepRecord& s) { return s.exposed_s; });
  if (run.replay)
    run.compute = median_of(metrics, run.every, [](const StepRecord& s) { return s.backward_s; });
  std::vector<double> steps;
  for (std::size_t i = 0; i < metrics.steps.size(); ++i)
    steps.push_back(metrics.steps[i].time_s - (i > 0 ? metrics.steps[i - 1].time_s : 0));
  run.step = quantile(without_warm_up(steps, run.every), 0.5);
  return run;
}

Judgement judge(const MeasuredRun& run, const std::vector<ExchangeProfile>& profiles,
                const PredictedNetwork& network) {
  const ExchangeProfile* best = nullptr;
  for (const ExchangeProfile& profile : profiles)
    if (!best && profile.method == run.method && profile.is_dense() == run.plain() &&
        profile.density == run.density.value_or(profile.density))
      best = &profile;
  if (!best && run.plain()) best = &profiles.at(0);
  if (!best)
    throw UserError("--measured: " + run.path + ": no run given was profiled with method " + run.method +
                    (run.density ? " at density " + short_text(*run.density) : "") +
                    "; encoding costs are known of profiled methods only, so give such a run too");
  ExchangeProfile profile = run.plain() && !codes_sums(run.collective) ? dense_profile(*best) : *best;
  if (run.replay) profile = replayed(profile, run.compute);
  PredictSetting setting;
  setting.ranks = run.ranks;
  setting.network = network;
  setting.merge = run.merge;
  setting.collective = run.collective;
  setting.groups = run.groups;
  setting.every = run.every;
  return {run, predict(profile, setting)};
}

}  // namespace topknot
