#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "lab/replay/replay.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"
#include "train/run_directory.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

// Over the steps that count.
double median(const ReplayResult& result, OverRanks ReplayStep::*figure, double OverRanks::*which) {
  std::vector<double> values;
  for (std::size_t i = kWarmUpSteps; i < result.steps.size(); ++i)
    values.push_back(result.steps[i].*figure.*which);
  return quantile(values, 0.5);
}

Json medians(const ReplayResult& result, OverRanks ReplayStep::*figure) {
  Json json;
  json["rank0"] = median(result, figure, &OverRanks::rank0);
  json["least"] = median(result, figure, &OverRanks::least);
  json["largest"] = median(result, figure, &OverRanks::largest);
  json["mean"] = median(result, figure, &OverRanks::mean);
  return json;
}

std::string bench_json(const ReplayReport& report, const ReplayResult& result) {
  const Config& config = report.config;
  Json json;
  json["recording"] = report.recording;
  json["recorded_steps"] = report.recorded_steps;
  json["model"] = config.model.name;
  json["parameters"] = result.parameters;
  json["ranks"] = config.dist.ranks;
  json["backend"] = report.backend;
  json["compress"] = config.compress.name;
  json["density"] = config.compress.name == "dense" ? 1.0 : config.compress.density;
  json["merge"] = config.exchange.merge;
  json["groups"] = result.groups;
  json["collective"] = config.exchange.collective;
  json["compute_s"] = report.options.compute_s;
  json["meet"] = report.options.meet;
  json["steps"] = report.options.steps;
  json["warm_up_steps"] = kWarmUpSteps;
  for (const auto& [key, figure] : kReplayFigures) json["medians"][key] = medians(result, figure);
  json["bytes_dense"] = 4 * result.parameters;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

StepRecord step_record(const ReplayReport& report, const ReplayResult& result, std::size_t index,
                       double time_s) {
  const ReplayStep& step = result.steps[index];
  StepRecord record;
  record.step = static_cast<std::int64_t>(index) + 1;
  record.time_s = time_s;
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.lr = report.config.optimizer.lr;
  record.density = report.config.compress.name == "dense" ? 1.0 : report.config.compress.density;
  record.selected = step.selected.mean;
  record.threshold = step.threshold;
  record.bytes_sent = step.bytes_sent.mean;
  record.bytes_received = step.bytes_received.mean;
  record.bytes_dense = 4.0 * static_cast<double>(result.parameters);
  record.bytes_ratio = record.bytes_sent > 0 ? record.bytes_dense / record.bytes_sent : 0;
  record.backward_s = report.options.compute_s;
  record.encode_s = step.encode_s.rank0;
  record.communicate_s = step.communicate_s.rank0;
  record.exposed_s = step.exposed_s.rank0;
  record.decode_s = step.decode_s.rank0;
  return record;
}

EndRecord end_record(const ReplayResult& result, double seconds) {
  EndRecord end;
  end.test.loss = std::numeric_limits<double>::quiet_NaN();
  end.wall_seconds = seconds;
  std::vector<double> steady;
  for (std::size_t i = 0; i < result.steps.size(); ++i) {
    end.bytes_sent += result.steps[i].bytes_sent.mean;
    end.bytes_received += result.steps[i].bytes_received.mean;
    end.bytes_dense += 4.0 * static_cast<double>(result.parameters);
    if (i >= kWarmUpSteps) steady.push_back(result.steps[i].step_s.rank0);
  }
  end.bytes_ratio = end.bytes_sent > 0 ? end.bytes_dense / end.bytes_sent : 0;
  end.steps = static_cast<std::int64_t>(result.steps.size());
  end.step_p50_s = quantile(steady, 0.5);
  end.step_p95_s = quantile(steady, 0.95);
  return end;
}

}  // namespace

void write_replay(const std::string& folder, const ReplayReport& report, const ReplayResult& result) {
  if (folder.empty()) return;
  const RunDirectory files{folder};
  double seconds = 0;
  {
    MetricsWriter metrics(files.metrics_jsonl());
    for (std::size_t i = 0; i < result.steps.size(); ++i) {
      seconds += result.steps[i].step_s.rank0;
      metrics.write(step_record(report, result, i, seconds));
    }
    metrics.write(end_record(result, seconds));
  }
  write_metrics_csv(files.metrics_jsonl(), files.metrics_csv());
  write_file(folder + "/bench.json", bench_json(report, result));
}

std::string replay_table(const ReplayReport& report, const ReplayResult& result) {
  const Config& config = report.config;
  std::string text = fmt::format(
      "{}: {}, {} parameters, {} recorded steps; {}{}; {} by {}, {}; medians of {} steps\n", report.recording,
      config.model.name, result.parameters, report.recorded_steps, config.compress.name,
      config.compress.name == "dense" ? "" : fmt::format(" at density {:g}", config.compress.density),
      count_text(config.dist.ranks, "rank"), report.backend,
      count_text(static_cast<std::int64_t>(result.groups), "group"), report.options.steps);
  text += fmt::format("{:<14} {:>12} {:>12} {:>12}\n", "milliseconds", "rank 0", "least", "largest");
  for (const auto& [key, figure] : std::span(kReplayFigures).first(kReplaySeconds)) {
    std::string row = key;
    row.resize(row.size() - 2);  // "_s"
    text += fmt::format(
        "{:<14} {:>12.3f} {:>12.3f} {:>12.3f}\n", row, 1e3 * median(result, figure, &OverRanks::rank0),
        1e3 * median(result, figure, &OverRanks::least), 1e3 * median(result, figure, &OverRanks::largest));
  }
  const double sent = median(result, &ReplayStep::bytes_sent, &OverRanks::mean);
  const double received = median(result, &ReplayStep::bytes_received, &OverRanks::mean);
  const double dense = 4.0 * static_cast<double>(result.parameters);
  text += fmt::format("a rank sends {} and receives {} in a step; dense is {}", format_bytes(sent),
                      format_bytes(received), format_bytes(dense));
  return text + (sent > 0 ? fmt::format(", {:.1f} times what it sends\n", dense / sent) : "\n");
}

}  // namespace topknot
