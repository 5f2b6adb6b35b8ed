// compare RUN... [--out report.html] [--csv FILE] [--target ACCURACY]

#include <charconv>
#include <iostream>

#include "nn/core/base/program.h"
#include "tools/common/options.h"
#include "tools/compare/compare.h"
#include "train/metrics/output_file.h"

using namespace topknot;

namespace {

constexpr const char* kText =
    "compare: puts runs of `train` side by side.\n\n"
    "  compare RUN... [--out report.html] [--csv FILE] [--target ACCURACY]\n\n"
    "RUN is a run directory, or a folder of run directories. A table is printed, and a self-contained page "
    "written.\n"
    "Runs that differ in seed alone are one method: mean and spread. Speed-ups are over the dense run.\n\n"
    "  --out FILE      where the page goes (default: report.html)\n"
    "  --csv FILE      the numbers as CSV, one row per method\n"
    "  --target ACC    accuracy to measure the time to, 0.7 or 70% (default: 95 % of the best dense "
    "accuracy)\n\n"
    "Examples:\n"
    "  compare runs/*\n"
    "  compare runs/dense runs/topk --target 70% --out topk.html\n";

double parse_accuracy(std::string text) {
  const bool percent = !text.empty() && text.back() == '%';
  const std::string given = text;
  if (percent) text.pop_back();
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (percent || value > 1) value /= 100;
  if (error != std::errc{} || end != text.data() + text.size() || !(value > 0) || value > 1)
    throw UserError("--target: '" + given + "' is no accuracy; write 0.7 or 70%");
  return value;
}

int run(int argc, char** argv) {
  std::vector<std::string> arguments;
  std::string out = "report.html", csv, target;
  CLI::App app("compare");
  app.add_option("--out", out);
  app.add_option("--csv", csv);
  app.add_option("--target", target);
  app.add_option("runs", arguments);
  if (!parse_options(app, kText, argc, argv)) return 0;
  if (arguments.empty()) misuse("compare", "no run given");
  std::optional<double> wanted;
  if (!target.empty()) wanted = parse_accuracy(target);
  std::vector<Run> runs;
  for (const auto& folder : find_runs(arguments)) runs.push_back(read_run(folder));
  const Comparison comparison = compare_runs(std::move(runs), wanted);
  write_file(out, report_html(comparison));
  if (!csv.empty()) write_file(csv, comparison_csv(comparison));
  std::cout << comparison_text(comparison) << "\nReport: " << out << "\n";
  std::cout.flush();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("compare", run, argc, argv);
}
