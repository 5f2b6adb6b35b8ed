// compare RUN... [--out report.html] [--csv FILE] [--target ACCURACY]

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <iostream>

#include "nn/core/base/check.h"
#include "tools/compare/compare.h"
#include "train/metrics/run_directory.h"

namespace {

constexpr const char* kText =
    "compare: puts runs of `train` side by side.\n\n"
    "  compare RUN... [--out report.html] [--csv FILE] [--target ACCURACY]\n\n"
    "RUN is a run directory, or a folder of run directorys. A table is printed, and a self-contained page "
    "written.\n"
    "Runs that differ in seed alone are one method: mean and spread. Speed-ups are over the dense run.\n\n"
    "  --out FILE      where the page goes (default: report.html)\n"
    "  --csv FILE      the numbers too, one row a method\n"
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
    throw topknot::UserError("--target: '" + given + "' is no accuracy; write 0.7 or 70%");
  return value;
}

int run(int argc, char** argv) {
  std::vector<std::string> arguments;
  std::string out = "report.html", csv, target;
  bool help = false;
  CLI::App app("compare");
  app.set_help_flag();
  app.add_flag("-h,--help", help);
  app.add_option("--out", out);
  app.add_option("--csv", csv);
  app.add_option("--target", target);
  app.add_option("runs", arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    throw topknot::UserError(std::string(e.what()) + "; 'compare --help' shows how it is used");
  }
  if (help || argc == 1) {
    std::cout << kText;
    return 0;
  }
  if (arguments.empty()) throw topknot::UserError("no run given; 'compare --help' shows how it is used");
  std::optional<double> wanted;
  if (!target.empty()) wanted = parse_accuracy(target);
  std::vector<topknot::Run> runs;
  for (const auto& folder : topknot::find_runs(arguments)) runs.push_back(topknot::read_run(folder));
  const auto comparison = topknot::compare_runs(std::move(runs), wanted);
  topknot::write_file(out, topknot::report_html(comparison));
  if (!csv.empty()) topknot::write_file(csv, topknot::comparison_csv(comparison));
  std::cout << topknot::comparison_text(comparison) << "\nReport: " << out << "\n";
  return std::cout.flush() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const topknot::UserError& e) {
    std::fprintf(stderr, "compare: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "compare: unexpected error: %s\n", e.what());
    return 1;
  }
}
