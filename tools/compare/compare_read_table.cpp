// A table of runs, as scripts/study-runs writes it.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

// The cells of a line of CSV (RFC 4180); one in quotes may hold commas, and a quote doubled. `place`: for messages.
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
      throw UserError(place_ + ": no column '" + column + "', so this is no runs.csv of scripts/study-runs");
    return cell->second;
  }

  // From 0 to `most`; kAbsent where it is not finite, as the value of a run that diverged.
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
       {Metric::accuracy(), Metric::squared_error(), Metric::perplexity(), Metric::word_errors()})
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

// Of a key that is there twice the last value counts, as on the command line of train, whose last key is the seed.
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

}  // namespace topknot
