// Runs, read: from run directories, and from a table of runs, as lab/train-runs writes it.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

// Run directories.

std::map<std::string, std::string> read_environment(const std::string& path) {
  std::map<std::string, std::string> result;
  using Json = nlohmann::json;
  constexpr std::size_t kMostBytes = 16 << 20;
  std::error_code error;
  if (!fs::exists(path, error)) return result;
  // Values nested deeper than a run writes are left out: dump() calls itself.
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const auto json = Json::parse(read_text_file(path, kMostBytes), shallow, false);
  if (!json.is_object()) return result;
  for (const auto& [name, value] : json.items())
    result[name] = value.is_string() ? value.get<std::string>()
                                     : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return result;
}

constexpr double kMostSeconds = 1e18;  // no run is longer: a larger number was not measured

// Seconds of one step at record i; a file may hold every n-th step only.
double step_seconds(const std::vector<StepRecord>& steps, std::size_t i) {
  const double time_before = i ? steps[i - 1].time_s : 0;
  const auto step_before = i ? steps[i - 1].step : 0;
  const auto count = std::max<std::int64_t>(1, steps[i].step - step_before);
  const double seconds = std::max(0.0, steps[i].time_s - time_before);
  return seconds < kMostSeconds ? seconds / static_cast<double>(count) : kAbsent;
}

// The total is all steps', the parts those of the steps whose parts were measured, of a GPU's run some. If none was, they are
// absent.
StepTimes mean_times(const std::vector<StepRecord>& steps) {
  StepTimes sum;
  double count = 0;
  std::vector<double> totals;
  for (std::size_t i = steps.size() > 2 * kWarmUpSteps ? kWarmUpSteps : 0; i < steps.size(); ++i) {
    const StepRecord& s = steps[i];
    const double parts =
        s.data_s + s.forward_s + s.backward_s + s.encode_s + s.exposed_s + s.decode_s + s.update_s;
    totals.push_back(step_seconds(steps, i));
    const double total = std::max(parts, totals.back());
    if (!(total < kMostSeconds)) continue;
    sum.data += s.data_s, sum.forward += s.forward_s, sum.backward += s.backward_s, sum.encode += s.encode_s;
    sum.exposed += s.exposed_s, sum.decode += s.decode_s, sum.update += s.update_s;
    sum.other += total - parts;
    sum.total += total;
    sum.hidden += std::max(0.0, s.communicate_s - s.exposed_s);
    ++count;
  }
  if (count == 0) {
    for (const StepPart& part : kStepParts) sum.*part.seconds = kAbsent;
    sum.total = sum.other = stat_of(totals).mean;
    return sum;
  }
  for (const StepPart& part : kStepParts) sum.*part.seconds /= count;
  if (count < static_cast<double>(totals.size())) {
    const double parts = sum.total - sum.other;
    sum.total = std::max(parts, stat_of(totals).mean);
    sum.other = sum.total - parts;
  }
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

// Task and metric of a run whose files are of a version that did not record them. Its data set tells: the
// values do not.
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

// Tables of runs.

// The cells of a line of CSV (RFC 4180); one in quotes may hold commas, and a quote doubled. `place`: for
// messages.
std::vector<std::string> cells_of(const std::string& line, const std::string& place) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted && c == '"' && i + 1 < line.size() && line[i + 1] == '"')
      cells.back() += line[++i];
    else if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      cells.emplace_back();
    else if (c != '\r')
      cells.back() += c;
  }
  if (quoted) throw UserError(place + ": the line ends inside quotes");
  return cells;
}

class Row {
 public:
  Row(const std::string& place, const std::vector<std::string>& header, const std::vector<std::string>& cells)
      : place_(place) {
    if (cells.size() != header.size())
      throw UserError(fmt::format("{}: {} cells, and the header has {}", place, cells.size(), header.size()));
    for (std::size_t i = 0; i < header.size(); ++i) cells_[header[i]] = cells[i];
  }

  const std::string& text(const std::string& column) const {
    const auto cell = cells_.find(column);
    if (cell == cells_.end())
      throw UserError(place_ + ": no column '" + column + "', so this is no runs.csv of lab/train-runs");
    return cell->second;
  }

  // From 0 to `most`; kAbsent if it is not finite, as the value of a run that diverged.
  double number(const std::string& column, double most = 1e18) const {
    const std::string& cell = text(column);
    double value = 0;
    const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
    if (error != std::errc{} || end != cell.data() + cell.size() || value < 0 ||
        (std::isfinite(value) && value > most))
      throw UserError(fmt::format("{}: {} is '{}', no number from 0 to {:g}", place_, column, cell, most));
    return std::isfinite(value) ? value : kAbsent;
  }

  std::int64_t count(const std::string& column) const {
    const double value = number(column);
    if (std::isnan(value))
      throw UserError(fmt::format("{}: {} is '{}', no number", place_, column, text(column)));
    return static_cast<std::int64_t>(value);
  }

  const std::string& place() const { return place_; }

 private:
  std::string place_;
  std::map<std::string, std::string> cells_;
};

Metric metric_of(const Row& row) {
  const std::string& name = row.text("metric");
  for (const Metric& known :
       {Metric::accuracy(), Metric::squared_error(), Metric::perplexity("token"), Metric::word_errors()})
    if (known.name == name) return known;
  throw UserError(fmt::format("{}: the metric '{}' is not known", row.place(), name));
}

// "a=1 b=[1, 2]" at its spaces outside of brackets.
std::vector<std::string> words_of(const std::string& keys) {
  std::vector<std::string> words(1);
  int depth = 0;
  for (const char c : keys) {
    depth += (c == '[') - (c == ']');
    if (c == ' ' && depth == 0)
      words.emplace_back();
    else
      words.back() += c;
  }
  return words;
}

// The last value of a key that is there twice counts, as on the command line of train, whose last key is the
// seed.
RunConfig config_of(const Row& row, const std::string& path) {
  std::vector<RunConfig::Entry> entries;
  const auto set = [&](const std::string& key, const std::string& value) {
    const auto known = std::ranges::find(entries, key, &RunConfig::Entry::key);
    if (known == entries.end())
      entries.push_back({key, value});
    else
      known->text = value;
  };
  for (const std::string& word : words_of(row.text("keys"))) {
    const std::size_t sign = word.find('=');
    if (sign == std::string::npos)
      throw UserError(row.place() + ": keys: expected KEY=VALUE, not '" + word + "'");
    set(word.substr(0, sign), word.substr(sign + 1));
  }
  set("seed", row.text("seed"));
  RunConfig config(path, std::move(entries));
  if (config.text("compress.name").empty())
    throw UserError(row.place() + ": no compress.name among the keys, which names the method");
  return config;
}

Run run_of(const Row& row, const std::string& table) {
  Run run;
  run.path = fmt::format("{}/{}-s{}", table, row.text("run"), row.text("seed"));
  run.config = config_of(row, run.path);
  run.environment["revision"] = row.text("commit");
  run.task = row.text("config");
  run.metric = metric_of(row);
  const double scale = run.metric.unit == "share" ? 0.01 : 1;
  run.last = scale * row.number("value", run.metric == Metric::accuracy() ? 100 : 1e18);
  run.diverged = std::isnan(run.last);
  if (!row.text("held_out").empty()) run.held_out = scale * row.number("held_out");
  run.wall_seconds = row.number("seconds");
  EndRecord end;
  end.steps = row.count("steps");
  end.skipped_steps = row.count("skipped_steps");
  end.parameter_checksum = row.text("checksum");
  end.eval_seconds = end.startup_seconds = end.step_p50_s = end.step_p95_s = kAbsent;
  const auto steps = static_cast<double>(end.steps);
  run.bytes_sent = steps * row.number("sent_per_step");
  run.bytes_received = steps * row.number("received_per_step");
  run.bytes_dense = steps * row.number("dense_per_step");
  run.metrics.end = end;
  return run;
}

}  // namespace

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

std::vector<Run> read_table(const std::string& path) {
  std::ifstream file = open_stream(path);
  std::string line;
  if (!std::getline(file, line)) throw UserError(path + ": is empty");
  if (line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // as spreadsheets write UTF-8
  const std::vector<std::string> header = cells_of(line, path + ":1");
  std::vector<Run> runs;
  for (int number = 2; std::getline(file, line); ++number) {
    const std::string place = fmt::format("{}:{}", path, number);
    if (line.empty() || line == "\r") continue;
    runs.push_back(run_of(Row(place, header, cells_of(line, place)), path));
  }
  if (runs.empty()) throw UserError(path + ": no run in it");
  return runs;
}

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

}  // namespace topknot
