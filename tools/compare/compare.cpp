#include "tools/compare/compare.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "compress/byte_count.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

// What makes two runs seeds of one configuration.
Config without_seed(Config config) {
  const Config defaults;
  config.seed = defaults.seed;
  config.output = defaults.output;
  // The same files may lie elsewhere on another host.
  config.data.root = defaults.data.root;
  // Of the section `compress` only the name means anything to a dense run.
  if (config.compress.name == "dense") config.compress = defaults.compress;
  return config;
}

std::vector<Method> group_runs(const std::vector<Run>& runs) {
  std::vector<Method> methods;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Config config = without_seed(runs[i].config);
    const std::string key = dump_yaml(config);
    const auto it = std::find(keys.begin(), keys.end(), key);
    if (it == keys.end()) {
      keys.push_back(key);
      methods.emplace_back();
      methods.back().config = config;
      methods.back().dense = config.compress.name == "dense";
      methods.back().runs.push_back(i);
    } else {
      methods[static_cast<std::size_t>(it - keys.begin())].runs.push_back(i);
    }
  }
  std::stable_partition(methods.begin(), methods.end(), [](const Method& m) { return m.dense; });
  for (Method& method : methods) {
    for (const auto i : method.runs)
      if (runs[i].complete()) method.counted.push_back(i);
    method.complete = !method.counted.empty();
    if (!method.complete) method.counted = method.runs;
  }
  return methods;
}

std::vector<DifferingKey> differing_keys(const std::vector<Method>& methods) {
  std::vector<DifferingKey> result;
  for (const Key& key : config_keys()) {
    DifferingKey row{key.name, {}};
    const bool of_compressed = key.name.rfind("compress.", 0) == 0 && key.name != "compress.name";
    for (const Method& method : methods)
      row.values.push_back(of_compressed && method.dense ? "-" : key_value(key, method.config));
    const std::string standard = key_value(key, Config());
    if (of_compressed && std::all_of(row.values.begin(), row.values.end(),
                                     [&](const auto& v) { return v == "-" || v == standard; }))
      continue;
    if (std::any_of(row.values.begin(), row.values.end(), [&](const auto& v) { return v != row.values[0]; }))
      result.push_back(std::move(row));
  }
  return result;
}

// The compressor's name, and where several methods share it, the keys that tell those apart.
void name_methods(std::vector<Method>& methods, const std::vector<DifferingKey>& differing) {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    Method& method = methods[i];
    method.name = method.config.compress.name;
    for (const auto& row : differing) {
      const bool tells = [&] {
        for (std::size_t j = 0; j < methods.size(); ++j)
          if (methods[j].config.compress.name == method.config.compress.name &&
              row.values[j] != row.values[i])
            return true;
        return false;
      }();
      if (tells) method.name += " " + row.key.substr(row.key.rfind('.') + 1) + "=" + row.values[i];
    }
  }
}

void choose_baselines(std::vector<Method>& methods, const std::vector<DifferingKey>& differing) {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    std::size_t least = std::numeric_limits<std::size_t>::max();
    for (std::size_t j = 0; j < methods.size(); ++j) {
      if (!methods[j].dense) continue;
      std::size_t count = 0;
      for (const auto& row : differing)
        if (row.key.rfind("compress.", 0) != 0 && row.key.rfind("exchange.", 0) != 0)
          count += row.values[i] != row.values[j];
      if (count < least) {
        least = count;
        methods[i].baseline = j;
      }
    }
  }
}

template <class Get>
Stat over(const std::vector<Run>& runs, const Method& method, Get get) {
  std::vector<double> values;
  for (const auto i : method.counted) values.push_back(get(runs[i]));
  return stat_of(values);
}

void sum_up(const std::vector<Run>& runs, Method& method) {
  method.best = over(runs, method, [](const Run& r) { return r.best; });
  method.last = over(runs, method, [](const Run& r) { return r.last; });
  method.images_per_second = over(runs, method, [](const Run& r) { return r.images_per_second; });
  method.wall_seconds = over(runs, method, [](const Run& r) { return r.wall_seconds; });
  const auto a_step = [](const Run& r, double total) {
    const auto steps = r.metrics.end ? r.metrics.end->steps : r.metrics.steps.back().step;
    return steps > 0 ? total / static_cast<double>(steps) : kAbsent;
  };
  method.bytes_a_step = over(runs, method, [&](const Run& r) { return a_step(r, r.bytes_sent); });
  method.received_a_step = over(runs, method, [&](const Run& r) { return a_step(r, r.bytes_received); });
  const Stat ratio = over(runs, method, [](const Run& r) {
    const ByteCount bytes{static_cast<std::uint64_t>(std::llround(r.bytes_sent)), 0,
                          static_cast<std::uint64_t>(std::llround(r.bytes_dense))};
    return bytes.upload > 0 ? bytes.ratio() : kAbsent;
  });
  method.dense_ratio = ratio.mean;
  for (double StepTimes::*part :
       {&StepTimes::data, &StepTimes::forward, &StepTimes::backward, &StepTimes::encode, &StepTimes::exposed,
        &StepTimes::decode, &StepTimes::update, &StepTimes::other, &StepTimes::total, &StepTimes::hidden})
    method.times.*part = over(runs, method, [&](const Run& r) { return r.times.*part; }).mean;
}

double seconds_to(const Run& run, double target) {
  for (const EvalRecord& eval : run.metrics.evals)
    if (eval.test_accuracy >= target) return eval.time_s;
  return kAbsent;
}

std::string points(double accuracy) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f %%", 100 * accuracy);
  return buffer;
}

void choose_target(Comparison& c, std::optional<double> target) {
  if (!c.has_accuracy) return;
  if (target) {
    c.target = *target;
    c.target_reason = "as asked for";
    return;
  }
  double dense = kAbsent, lowest = kAbsent;
  for (const Method& m : c.methods) {
    if (std::isnan(m.best.mean)) continue;
    if (m.dense) dense = std::isnan(dense) ? m.best.mean : std::max(dense, m.best.mean);
    lowest = std::isnan(lowest) ? m.best.mean : std::min(lowest, m.best.mean);
  }
  if (!std::isnan(dense)) {
    c.target = 0.95 * dense;
    c.target_reason = "95 % of the best dense accuracy, " + points(dense);
  } else if (!std::isnan(lowest)) {
    c.target = lowest;
    c.target_reason = "the lowest of the methods' best accuracies, as there is no dense run";
  }
}

void measure_target(Comparison& c) {
  if (std::isnan(c.target)) return;
  for (Method& m : c.methods) {
    m.seconds_to_target = over(c.runs, m, [&](const Run& r) { return seconds_to(r, c.target); });
    m.reached = m.seconds_to_target.count;
  }
}

void compare_with_baseline(std::vector<Method>& methods) {
  for (Method& m : methods) {
    if (!m.baseline) continue;
    const Method& base = methods[*m.baseline];
    if (base.images_per_second.mean > 0) m.speed_up = m.images_per_second.mean / base.images_per_second.mean;
    // Only where every run arrived; else the mean would be of the lucky ones.
    const bool all = m.reached == static_cast<int>(m.counted.size()) &&
                     base.reached == static_cast<int>(base.counted.size());
    if (all && m.seconds_to_target.mean > 0)
      m.target_speed_up = base.seconds_to_target.mean / m.seconds_to_target.mean;
  }
}

void warn(Comparison& c) {
  std::set<std::string> machines, places;
  for (const Run& run : c.runs) {
    const auto it = run.environment.find("cpu");
    if (it != run.environment.end()) machines.insert(it->second);
    const auto host = run.environment.find("host");
    if (host != run.environment.end()) places.insert(host->second);
    if (!run.complete())
      c.warnings.push_back(
          run.path + " is incomplete: it stopped after step " +
          std::to_string(run.metrics.steps.back().step) +
          (run.metrics.truncated ? ", in the middle of a line" : "") +
          ". Its curve is shown dashed as far as it goes; means leave it out where they can");
    else if (run.metrics.end->skipped_steps > 0)
      c.warnings.push_back(run.path + " skipped " + std::to_string(run.metrics.end->skipped_steps) +
                           " steps that were not finite");
  }
  if (machines.size() > 1 || places.size() > 1)
    c.warnings.push_back(
        "the runs come from different machines: times and speed-ups do not compare the methods alone");
  for (const auto& row : c.differing)
    for (const char* key : {"model.name", "data.name", "data.batch_size", "data.train_size", "data.test_size",
                            "data.noise", "dist.ranks", "dist.backend", "train.threads", "train.epochs"})
      if (row.key == key)
        c.warnings.push_back(row.key +
                             " differs between the methods, so more than the compression is compared");
  bool any_dense = false;
  for (const Method& m : c.methods) any_dense = any_dense || m.dense;
  if (!any_dense) c.warnings.push_back("there is no dense run, so there is no speed-up over it");
}

}  // namespace

Stat stat_of(const std::vector<double>& values) {
  Stat stat;
  double sum = 0;
  for (const double v : values)
    if (std::isfinite(v)) sum += v, ++stat.count;
  if (stat.count == 0) return stat;
  stat.mean = sum / stat.count;
  double squares = 0;
  for (const double v : values)
    if (std::isfinite(v)) squares += (v - stat.mean) * (v - stat.mean);
  if (stat.count > 1) stat.deviation = std::sqrt(squares / (stat.count - 1));
  return stat;
}

Comparison compare_runs(std::vector<Run> runs, std::optional<double> target) {
  TOPKNOT_CHECK(!runs.empty(), "no runs to compare");
  Comparison c;
  c.runs = std::move(runs);
  for (const Run& run : c.runs)
    for (const EvalRecord& eval : run.metrics.evals)
      c.has_accuracy = c.has_accuracy || eval.test_accuracy > 0;
  c.methods = group_runs(c.runs);
  c.differing = differing_keys(c.methods);
  name_methods(c.methods, c.differing);
  choose_baselines(c.methods, c.differing);
  for (Method& method : c.methods) sum_up(c.runs, method);
  choose_target(c, target);
  measure_target(c);
  compare_with_baseline(c.methods);
  warn(c);
  return c;
}

}  // namespace topknot
