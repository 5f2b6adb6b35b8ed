// A table of runs, as scripts/study-runs writes it.

#include <fmt/format.h>

#include <charconv>
#include <fstream>

#include "nn/core/base/check.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

// The cells of a line of CSV (RFC 4180); one in quotes may hold commas, and a quote doubled.
std::vector<std::string> cells_of(const std::string& line) {
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

  template <class T = double>
  T number(const std::string& column) const {
    const std::string& cell = text(column);
    T value = 0;
    const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
    if (error != std::errc{} || end != cell.data() + cell.size())
      throw UserError(fmt::format("{}: {} is '{}', no number", place_, column, cell));
    return value;
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

RunConfig config_of(const Row& row, const std::string& path) {
  std::vector<RunConfig::Entry> entries = {{"seed", row.text("seed")}};
  std::string keys = row.text("keys");
  for (std::size_t at = 0; at < keys.size();) {
    const std::size_t end = std::min(keys.find(' ', at), keys.size()), sign = keys.find('=', at);
    if (sign >= end)
      throw UserError(row.place() + ": keys: expected KEY=VALUE, not '" + keys.substr(at, end - at) + "'");
    entries.push_back({keys.substr(at, sign - at), keys.substr(sign + 1, end - sign - 1)});
    at = end + 1;
  }
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
  run.last = scale * row.number("value");
  run.diverged = !std::isfinite(run.last);
  if (run.diverged) run.last = kAbsent;
  if (!row.text("held_out").empty()) run.held_out = scale * row.number("held_out");
  run.wall_seconds = row.number("seconds");
  EndRecord end;
  end.steps = row.number<std::int64_t>("steps");
  end.skipped_steps = row.number<std::int64_t>("skipped_steps");
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
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line)) throw UserError(path + ": cannot be read, or is empty");
  const std::vector<std::string> header = cells_of(line);
  std::vector<Run> runs;
  for (int number = 2; std::getline(file, line); ++number)
    runs.push_back(run_of(Row(fmt::format("{}:{}", path, number), header, cells_of(line)), path));
  if (runs.empty()) throw UserError(path + ": no run in it");
  return runs;
}

}  // namespace topknot
