#include "tools/compare/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/core/base/check.h"
#include "nn/core/base/text.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> read_environment(const std::string& path) {
  std::map<std::string, std::string> result;
  std::ifstream stream(path);
  using Json = nlohmann::json;
  // What is nested deeper than a run writes is left out: dump() calls itself.
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const auto json = Json::parse(stream, shallow, false);
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

double median_rate(const std::vector<StepRecord>& steps) {
  std::vector<double> rates;
  for (std::size_t i = steps.size() > kWarmUpSteps ? kWarmUpSteps : 0; i < steps.size(); ++i)
    if (std::isfinite(steps[i].images_per_second)) rates.push_back(steps[i].images_per_second);
  return rates.empty() ? kAbsent : quantile(rates, 0.5);
}

void derive(Run& run) {
  const Metrics& m = run.metrics;
  // Accuracy is 0 throughout where there are no classes.
  const bool accuracy =
      std::any_of(m.evals.begin(), m.evals.end(), [](const auto& e) { return e.test_accuracy > 0; });
  for (const EvalRecord& eval : m.evals) {
    const double value = accuracy ? eval.test_accuracy : eval.test_loss;
    if (!std::isfinite(value)) continue;
    run.last = value;
    if (std::isnan(run.best) || (accuracy ? value > run.best : value < run.best)) run.best = value;
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
  run.images_per_second = median_rate(m.steps);
  run.wall_seconds = m.steps.back().time_s;
  if (m.end) {
    if (accuracy) {
      run.last = m.end->test_accuracy;
      run.best = m.end->best_test_accuracy;
    }
    run.images_per_second = m.end->images_per_second;
    run.wall_seconds = m.end->wall_seconds;
    run.bytes_sent = m.end->bytes_sent;
    run.bytes_dense = m.end->bytes_dense;
    received = m.end->bytes_received;
  }
  if (received > 0 || run.config.number("dist.ranks") == 1) run.bytes_received = received;
}

bool starts(const std::string& key, const char* section) {
  return key.starts_with(section);
}

// Of the section `compress` only the name means anything to a dense run.
bool of_compressed(const std::string& key) {
  return starts(key, "compress.") && key != "compress.name";
}

// The keys of all runs in the order of their files. The seed and the output tell seeds of one configuration
// apart, and the same data may lie elsewhere on another host.
std::vector<std::string> keys_of(const std::vector<Run>& runs) {
  std::vector<std::string> keys;
  std::set<std::string> seen;
  for (const Run& run : runs)
    for (const auto& entry : run.config.entries())
      if (entry.key != "seed" && entry.key != "data.root" && !starts(entry.key, "output.") &&
          seen.insert(entry.key).second)
        keys.push_back(entry.key);
  return keys;
}

// A key's default value, as the first run that has it shows it; "-" where every run was given another.
std::string default_of(const std::vector<Run>& runs, const std::string& key) {
  for (const Run& run : runs)
    if (const auto* entry = run.config.find(key); entry && !entry->given) return entry->text;
  return "-";
}

std::vector<Method> group_runs(const std::vector<Run>& runs, const std::vector<std::string>& keys) {
  std::vector<Method> methods;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool dense = runs[i].config.text("compress.name") == "dense";
    std::map<std::string, std::string> config;
    for (const std::string& key : keys) {
      const auto* entry = runs[i].config.find(key);
      config[key] = dense && of_compressed(key) ? "-" : entry ? entry->text : default_of(runs, key);
    }
    auto method =
        std::find_if(methods.begin(), methods.end(), [&](const Method& m) { return m.config == config; });
    if (method == methods.end()) {
      method = methods.emplace(methods.end());
      method->config = config;
      method->dense = dense;
    }
    method->runs.push_back(i);
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

std::vector<DifferingKey> differing_keys(const std::vector<Run>& runs, const std::vector<Method>& methods,
                                         const std::vector<std::string>& keys) {
  std::vector<DifferingKey> result;
  for (const std::string& key : keys) {
    DifferingKey row{key, {}};
    for (const Method& method : methods) row.values.push_back(method.config.at(key));
    const std::string standard = default_of(runs, key);
    const auto plain = [&](const std::string& value) { return value == "-" || value == standard; };
    if (of_compressed(key) && std::all_of(row.values.begin(), row.values.end(), plain)) continue;
    if (std::any_of(row.values.begin(), row.values.end(), [&](const auto& v) { return v != row.values[0]; }))
      result.push_back(std::move(row));
  }
  return result;
}

// The compressor's name, and where several methods share it, the keys in which those differ.
void name_methods(const std::vector<Run>& runs, std::vector<Method>& methods,
                  const std::vector<DifferingKey>& differing) {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    Method& method = methods[i];
    method.name = runs[method.runs[0]].config.text("compress.name");
    for (const auto& row : differing) {
      const bool tells = [&] {
        for (std::size_t j = 0; j < methods.size(); ++j)
          if (methods[j].config.at("compress.name") == method.config.at("compress.name") &&
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
        if (!starts(row.key, "compress.") && !starts(row.key, "exchange."))
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
  const auto per_step = [](const Run& r, double total) {
    const auto steps = r.metrics.end ? r.metrics.end->steps : r.metrics.steps.back().step;
    return steps > 0 ? total / static_cast<double>(steps) : kAbsent;
  };
  method.bytes_per_step = over(runs, method, [&](const Run& r) { return per_step(r, r.bytes_sent); });
  method.received_per_step = over(runs, method, [&](const Run& r) { return per_step(r, r.bytes_received); });
  const Stat ratio = over(runs, method, [](const Run& r) {
    const double sent = std::round(r.bytes_sent);
    return sent > 0 ? std::round(r.bytes_dense) / sent : kAbsent;
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
    c.target_reason = fmt::format("95 % of the best dense accuracy, {:.1f} %", 100 * dense);
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
    // Only where every run reached the target; otherwise the mean would be of the fastest ones.
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
      c.warnings.push_back(fmt::format(
          "{} is incomplete: it stopped after step {}{}. Its curve is shown dashed as far as it goes; "
          "means leave it out where they can",
          run.path, run.metrics.steps.back().step, run.metrics.truncated ? ", in the middle of a line" : ""));
    else if (run.metrics.end->skipped_steps > 0)
      c.warnings.push_back(
          fmt::format("{} skipped {} steps that were not finite", run.path, run.metrics.end->skipped_steps));
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
  for (const auto& run : runs)
    if (std::find(unique.begin(), unique.end(), run) == unique.end()) unique.push_back(run);
  return unique;
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
  derive(run);
  return run;
}

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
  const std::vector<std::string> keys = keys_of(c.runs);
  c.methods = group_runs(c.runs, keys);
  c.differing = differing_keys(c.runs, c.methods, keys);
  name_methods(c.runs, c.methods, c.differing);
  choose_baselines(c.methods, c.differing);
  for (Method& method : c.methods) sum_up(c.runs, method);
  choose_target(c, target);
  measure_target(c);
  compare_with_baseline(c.methods);
  warn(c);
  return c;
}

}  // namespace topknot
