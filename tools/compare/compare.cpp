#include "tools/compare/compare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <regex>
#include <set>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

bool starts(const std::string& key, const char* section) {
  return key.starts_with(section);
}

// A dense run uses only the name in section `compress`.
bool of_compressed(const std::string& key) {
  return starts(key, "compress.") && key != "compress.name";
}

// The keys of all runs in the order of their files, without those that tell seeds of one configuration apart:
// the seed, the output, where data and caches lie on a host, and where a job's ranks meet. dist.interface and
// dist.nccl stay: networks are compared by them.
std::vector<std::string> keys_of(const std::vector<Run>& runs) {
  static const std::set<std::string> apart = {"seed", "data.root", "train.algorithm_cache", "dist.master",
                                              "dist.token"};
  std::vector<std::string> keys;
  std::set<std::string> seen;
  for (const Run& run : runs)
    for (const auto& entry : run.config.entries())
      if (!apart.count(entry.key) && !starts(entry.key, "output.") && seen.insert(entry.key).second)
        keys.push_back(entry.key);
  return keys;
}

// A key's default value, as the first run that has it shows it; "-" if every run was given another.
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
      method->compressor = runs[i].config.text("compress.name");
      method->network = runs[i].network;
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

// "A" to "Z", "AA", ...
std::string letter_of(std::size_t i) {
  return (i < 26 ? "" : letter_of(i / 26 - 1)) + static_cast<char>('A' + i % 26);
}

// Bytes of keys, and of a name, that a legend or a table's first column can hold.
constexpr std::size_t kLongestKeys = 32, kLongestName = 40;

// The name that a method's runs have in their folders: "dgc_one_scope" for dgc_one_scope-s1 and
// dgc_one_scope-s2. "" if they do not agree or do not name its compressor.
std::string folder_name(const std::vector<Run>& runs, const Method& method) {
  static const std::regex seed("-s[0-9]+$");
  std::string name;
  for (const std::size_t i : method.runs) {
    const auto folder = (std::filesystem::path(runs[i].path) / ".").lexically_normal().parent_path();
    std::string here = folder.filename().string();
    if (here.size() > 2 * kLongestName) return "";  // a table may have any text, and std::regex calls itself
    here = std::regex_replace(here, seed, "");
    if (here.size() > kLongestName || here.find(method.compressor) == std::string::npos) return "";
    if (i != method.runs.front() && here != name) return "";
    name = here;
  }
  return name;
}

// Names each method by its compressor. If several methods share it, the keys in which they differ follow in
// the name itself or, if one of these lists is long, the name of the runs' folders or a letter stands for
// them. Methods with the same keys share a letter.
void name_methods(Comparison& c) {
  struct Keys {
    std::string brief, full;  // by the last parts of their names; by whole names
  };
  std::vector<Keys> keys(c.methods.size());
  std::map<std::string, bool> lettered;  // by compressor
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const std::string& compressor = c.methods[i].compressor;
    for (const auto& row : c.differing) {
      if (!tells_apart(c, row, i)) continue;
      keys[i].brief += brief_key(row, i);
      keys[i].full += (keys[i].full.empty() ? "" : " ") + row.key + "=" + row.values[i];
    }
    lettered[compressor] = lettered[compressor] || keys[i].brief.size() > kLongestKeys;
  }
  std::vector<std::string> folders;
  std::map<std::string, int> uses;
  for (const Method& method : c.methods) ++uses[folders.emplace_back(folder_name(c.runs, method))];
  bool by_folder = true;
  for (std::size_t i = 0; i < c.methods.size(); ++i)
    by_folder &= !lettered[c.methods[i].compressor] || (!folders[i].empty() && uses[folders[i]] == 1);
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    Method& method = c.methods[i];
    method.name = method.compressor + keys[i].brief;
    if (!lettered[method.compressor]) continue;
    if (by_folder) {
      method.name = folders[i];
      c.abbreviations.push_back({folders[i], keys[i].full});
      continue;
    }
    auto known = std::find_if(c.abbreviations.begin(), c.abbreviations.end(),
                              [&](const Abbreviation& a) { return a.keys == keys[i].full; });
    if (known == c.abbreviations.end())
      known = c.abbreviations.insert(known, {letter_of(c.abbreviations.size()), keys[i].full});
    method.name = method.compressor + " " + known->text;
  }
}

void choose_baselines(std::vector<Method>& methods, const std::vector<DifferingKey>& differing) {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    std::size_t least = std::numeric_limits<std::size_t>::max();
    for (std::size_t j = 0; j < methods.size(); ++j) {
      if (!methods[j].dense) continue;
      std::size_t count = 0;
      bool same_ranks = true;
      for (const auto& row : differing) {
        if (starts(row.key, "compress.") || starts(row.key, "exchange.") || row.values[i] == row.values[j])
          continue;
        ++count;
        same_ranks = same_ranks && row.key != "dist.ranks";
      }
      if (same_ranks && count < least) {
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
  method.second = over(runs, method, [](const Run& r) { return r.second; });
  method.held_out = over(runs, method, [](const Run& r) { return r.held_out; });
  if (std::ranges::any_of(method.counted, [&](std::size_t i) { return runs[i].diverged; }))
    method.last = method.held_out = Stat{};
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
  if (method.dense_ratio > 0) method.bits = 32 / method.dense_ratio;
  for (const StepPart& part : kStepParts)
    method.times.*part.seconds = over(runs, method, [&](const Run& r) {
                                   return r.metrics.steps.empty() ? kAbsent : r.times.*part.seconds;
                                 }).mean;
}

// The first evaluation that reaches the target; null if none does.
const EvalRecord* reaching(const Run& run, double target) {
  for (const EvalRecord& eval : run.metrics.evals)
    if (reaches(run.metric, run.metric.value(eval.test), target)) return &eval;
  return nullptr;
}

void choose_target(Comparison& c, std::optional<double> target) {
  if (target) {
    if (std::ranges::all_of(c.runs, [](const Run& run) { return run.metrics.evals.empty(); }))
      throw UserError("--target: these runs have no evaluations that could reach it");
    c.target = *target;
    c.target_reason = "as asked for";
  }
  if (target || c.metric.name == "loss") return;
  double dense = kAbsent, worst = kAbsent;
  for (const Method& m : c.methods) {
    if (std::isnan(m.best.mean)) continue;
    if (m.dense && (std::isnan(dense) || reaches(c.metric, m.best.mean, dense))) dense = m.best.mean;
    if (std::isnan(worst) || reaches(c.metric, worst, m.best.mean)) worst = m.best.mean;
  }
  // A run whose metric stays 0 has reached it from the start.
  if (dense > 0) {
    const int percent = c.metric.higher_is_better ? 95 : 105;
    c.target = percent / 100.0 * dense;
    c.target_reason = fmt::format("{} % of the best dense {}, {}", percent, title_of(c.metric),
                                  value_text(c.metric, stat_of({dense})));
  } else if (std::isnan(dense) && worst > 0) {
    c.target = worst;
    c.target_reason = fmt::format("the {} of the methods' best values, as there is no dense run",
                                  c.metric.higher_is_better ? "lowest" : "greatest");
  }
}

void measure_target(Comparison& c) {
  if (std::isnan(c.target)) return;
  for (Method& m : c.methods) {
    const auto at_target = [&](auto EvalRecord::*number) {
      return over(c.runs, m, [&](const Run& r) {
        const EvalRecord* eval = reaching(r, c.target);
        return eval ? static_cast<double>(eval->*number) : kAbsent;
      });
    };
    m.seconds_to_target = at_target(&EvalRecord::time_s);
    m.steps_to_target = at_target(&EvalRecord::step);
    m.reached = m.seconds_to_target.count;
  }
}

void compare_with_baseline(std::vector<Method>& methods) {
  for (Method& m : methods) {
    if (!m.baseline) continue;
    const Method& base = methods[*m.baseline];
    if (base.images_per_second.mean > 0) m.speed_up = m.images_per_second.mean / base.images_per_second.mean;
    // Only if every run reached the target; otherwise the mean would be of the fastest ones.
    const bool all = m.reached == static_cast<int>(m.counted.size()) &&
                     base.reached == static_cast<int>(base.counted.size());
    if (all && m.seconds_to_target.mean > 0)
      m.target_speed_up = base.seconds_to_target.mean / m.seconds_to_target.mean;
  }
}

// Throws if a number of one run means nothing next to that of another.
void check_one_task(const std::vector<Run>& runs) {
  const auto described = [](const Run& run) {
    return fmt::format("{} has {} by {}{}", run.path, run.task.empty() ? "an unnamed task" : run.task,
                       run.metric.name, run.metric.unit.empty() ? "" : " (" + run.metric.unit + ")");
  };
  for (const Run& run : runs)
    if (run.task != runs[0].task || !(run.metric == runs[0].metric))
      throw UserError(fmt::format(
          "these runs have different tasks, so their results cannot be compared: {}; {}. Compare the "
          "runs of each task by themselves",
          described(runs[0]), described(run)));
}

void warn(Comparison& c) {
  std::set<std::string> machines, places, revisions;
  for (const Run& run : c.runs) {
    const auto it = run.environment.find("cpu");
    if (it != run.environment.end()) machines.insert(it->second);
    const auto host = run.environment.find("host");
    if (host != run.environment.end()) places.insert(host->second);
    if (const auto revision = run.environment.find("revision"); revision != run.environment.end())
      revisions.insert(revision->second);
    for (const StartRecord& start : run.metrics.starts)
      if (!start.revision.empty()) revisions.insert(start.revision);
    for (const StartRecord& start : run.metrics.starts)
      if (start.backend != run.metrics.starts.front().backend) {
        c.warnings.push_back(
            fmt::format("{} went on over another network ({}, then {}), and its times are of both", run.path,
                        run.metrics.starts.front().backend, start.backend));
        break;
      }
    if (run.diverged)
      c.warnings.push_back(fmt::format(
          "the last {} of {} is not finite: its method has no final value, and the other means are of "
          "the evaluations that were finite",
          title_of(c.metric), run.path));
    if (!run.complete())
      c.warnings.push_back(fmt::format(
          "{} is incomplete: it stopped after step {}{}. Its curve is thin and ends where the run did; "
          "means leave it out where they can",
          run.path, run.metrics.steps.back().step, run.metrics.truncated ? ", in the middle of a line" : ""));
    else if (run.metrics.end->failed)
      c.warnings.push_back(fmt::format("{} has failed: {}", run.path, run.metrics.end->reason));
    else if (run.metrics.end->skipped_steps > 0)
      c.warnings.push_back(
          fmt::format("{} skipped {} steps that were not finite", run.path, run.metrics.end->skipped_steps));
  }
  if (machines.size() > 1 || places.size() > 1)
    c.warnings.push_back(
        "the runs come from different machines: times and speed-ups do not compare the methods alone");
  if (revisions.size() > 1)
    c.warnings.push_back(
        fmt::format("the runs are of different commits ({}), so more than the methods is compared",
                    fmt::join(revisions, ", ")));
  for (const Method& m : c.methods) {
    std::set<std::string> seeds;
    for (const std::size_t i : m.counted)
      if (const std::string seed = c.runs[i].config.text("seed"); !seeds.insert(seed).second)
        c.warnings.push_back(
            fmt::format("{} has seed {} more than once ({}): its deviation is not that of seeds", m.name,
                        seed, c.runs[i].path));
  }
  for (const auto& row : c.differing)
    for (const char* key : {"model.name", "data.name", "data.batch_size", "data.train_size", "data.test_size",
                            "data.noise", "dist.ranks", "dist.backend", "dist.link.rate", "dist.link.latency",
                            "train.threads", "train.epochs"})
      if (row.key == key)
        c.warnings.push_back(row.key +
                             " differs between the methods, so more than the compression is compared");
  constexpr double kUnequal = 1.3;
  for (const Method& m : c.methods) {
    if (!m.baseline) continue;
    const StepTimes &base = c.methods[*m.baseline].times, &own = m.times;
    const double there = base.forward + base.backward, here = own.forward + own.backward;
    if (!(there > 0 && here > 0) || std::max(here / there, there / here) < kUnequal) continue;
    c.warnings.push_back(fmt::format(
        "forward and backward of a step took {:.3g} ms under {} and {:.3g} ms under {}: the machine was "
        "not equally free, communication took its cores, or they are other programs, so times do not "
        "compare the methods alone",
        1e3 * here, m.name, 1e3 * there, c.methods[*m.baseline].name));
  }
  bool any_dense = false;
  for (const Method& m : c.methods) any_dense = any_dense || m.dense;
  if (!any_dense && has_times(c))
    c.warnings.push_back("there is no dense run, so there is no speed-up over it");
  for (const Method& m : c.methods)
    if (any_dense && !m.baseline && has_times(c))
      c.warnings.push_back(m.name +
                           ": there is no dense run on as many ranks, so there is no speed-up over it");
}

}  // namespace

bool tells_apart(const Comparison& c, const DifferingKey& key, std::size_t method) {
  for (std::size_t j = 0; j < c.methods.size(); ++j)
    if (c.methods[j].compressor == c.methods[method].compressor && key.values[j] != key.values[method])
      return true;
  return false;
}

std::string brief_key(const DifferingKey& key, std::size_t method) {
  // An empty text is the method's own choice, and "-" a default that no run shows; the others' values tell
  // them apart.
  const std::string& value = key.values[method];
  if (value == "\"\"" || value == "-") return "";
  return " " + key.key.substr(key.key.rfind('.') + 1) + "=" + value;
}

bool has(const Comparison& comparison, Stat Method::*stat) {
  return std::any_of(comparison.methods.begin(), comparison.methods.end(),
                     [&](const Method& m) { return (m.*stat).count > 0; });
}

bool reaches(const Metric& metric, double value, double target) {
  return metric.higher_is_better ? value >= target : value <= target;
}

std::string shared_network(const std::vector<Method>& methods) {
  for (const Method& method : methods)
    if (method.network != methods[0].network) return "";
  return methods[0].network;
}

std::string emulated_link(const std::vector<Method>& methods) {
  std::set<std::string> links;
  for (const Method& method : methods) {
    const auto at = method.network.find("emulated link");
    links.insert(at == std::string::npos ? "" : method.network.substr(at));
  }
  if (links.size() == 1) return *links.begin();
  return links.count("") ? "partly emulated links" : "emulated links";
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
  check_one_task(c.runs);
  c.task = c.runs[0].task;
  c.metric = c.runs[0].metric;
  const std::vector<std::string> keys = keys_of(c.runs);
  c.methods = group_runs(c.runs, keys);
  c.differing = differing_keys(c.runs, c.methods, keys);
  name_methods(c);
  std::vector<PlannedMethod> lines;
  for (const Method& method : c.methods) {
    const auto plan = method.config.find("exchange.merge");
    lines.push_back({method.compressor, plan == method.config.end() ? "" : plan->second});
  }
  c.styles = line_styles(lines);
  choose_baselines(c.methods, c.differing);
  for (Method& method : c.methods) sum_up(c.runs, method);
  choose_target(c, target);
  measure_target(c);
  compare_with_baseline(c.methods);
  warn(c);
  return c;
}

}  // namespace topknot
