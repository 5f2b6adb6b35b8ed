// The files of a run directory and tables of runs, as `compare` reads them.
#include <string>

#include "nn/base/check.h"
#include "tests/fuzz/inputs/input_target.h"
#include "tools/compare/compare.h"

namespace topknot::fuzz {
namespace {

constexpr std::string_view kConfig = "model:\n  name: mlp\ncompress:\n  name: topk\n  density: 0.01\n";
constexpr std::string_view kMetrics =
    "{\"event\":\"step\",\"step\":1,\"loss\":2.5,\"time_s\":0.1,\"bytes_sent\":8,\"bytes_dense\":80}\n";

Bytes bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

void write_all(const Comparison& comparison) {
  comparison_text(comparison);
  comparison_csv(comparison);
  comparison_json(comparison);
  report_html(comparison);
}

void compare_run(Bytes metrics, Bytes config) {
  static const Scratch scratch;
  scratch.write("run/metrics.jsonl", metrics);
  scratch.write("run/config.yaml", config);
  scratch.write("other/metrics.jsonl", bytes_of(kMetrics));
  scratch.write("other/config.yaml", bytes_of(kConfig));
  write_all(compare_runs({read_run(scratch.path("run")), read_run(scratch.path("other"))}, std::nullopt));
}

void compare_table(Bytes table) {
  static const Scratch scratch;
  scratch.write("runs.csv", table);
  write_all(compare_runs(read_table(scratch.path("runs.csv")), std::nullopt));
}

const bool added = [] {
  input_targets().add("metrics", "metrics.jsonl", [](Bytes input) { compare_run(input, bytes_of(kConfig)); });
  input_targets().add("run_config", "config.yaml of a run directory",
                      [](Bytes input) { compare_run(bytes_of(kMetrics), input); });
  input_targets().add("run_table", "table of runs (.csv)", compare_table);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
