// compare RUN... [--out FILE]... [--target VALUE]

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iostream>

#include "nn/base/program.h"
#include "tools/common/options.h"
#include "tools/compare/compare.h"
#include "train/metrics/output_file.h"

using namespace topknot;

namespace {

constexpr const char* kText =
    "compare: puts runs of `train` side by side.\n\n"
    "  compare RUN... [--out FILE]... [--target VALUE]\n\n"
    "RUN is a run directory, a folder of run directories, or a table of runs that lab/train-runs wrote "
    "(.csv). The results.json of `lab/netlab compare` stands alone; its page is drawn.\n"
    "A table is printed, and a self-contained page written.\n"
    "Runs that differ in seed alone are one method: mean and spread. Speed-ups are over the dense run. Runs "
    "of\n"
    "different tasks are refused.\n\n"
    "  --out FILE      what to write, by its ending: .html the page (default: report.html), .csv one row "
    "per\n"
    "                  method, .json everything, .svg the metric over time, .epochs.svg over epochs\n"
    "                  alone, .bits.svg its last value against the bits sent; may be given several times\n"
    "  --target VALUE  what to measure the time to: an accuracy, 0.7 or 70%, or a loss (default: 95 % of "
    "the\n"
    "                  best dense accuracy)\n\n"
    "Examples:\n"
    "  compare runs/*\n"
    "  compare runs/dense runs/topk --target 70% --out topk.html --out topk.csv\n";

struct Format {
  const char* ending;
  std::string (*text)(const Comparison&);
};
constexpr Format kFormats[] = {{".html", report_html},      {".csv", comparison_csv},
                               {".json", comparison_json},  {".bits.svg", bits_svg},
                               {".epochs.svg", epochs_svg}, {".svg", quality_svg}};

const Format& format_of(const std::string& file) {
  std::string known;
  for (const Format& format : kFormats) {
    if (file.ends_with(format.ending)) return format;
    known += std::string(known.empty() ? "" : ", ") + format.ending;
  }
  throw UserError("--out: the ending of '" + file + "' says what to write; there are " + known);
}

double parse_target(std::string text, const Metric& metric) {
  const bool share = metric.unit == "share", percent = share && text.ends_with('%');
  const std::string given = text;
  if (percent) text.pop_back();
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (percent || (share && value > 1)) value /= 100;
  if (error != std::errc{} || end != text.data() + text.size() || !(value > 0) || (share && value > 1))
    throw UserError("--target: '" + given + "' is no " + metric.name + "; write " +
                    (share ? "0.7 or 70%" : "a number above 0"));
  return value;
}

bool is_lab(const std::string& argument) {
  std::error_code error;
  return argument.ends_with(".json") && !std::filesystem::is_directory(argument, error);
}

bool is_page(const std::string& file) {
  return file.ends_with(".html");
}

void print_reports(const std::vector<std::string>& out) {
  for (const std::string& file : out) std::cout << "Report: " << file << "\n";
  std::cout.flush();
}

int run(int argc, char** argv) {
  std::vector<std::string> arguments, out;
  std::string target;
  CLI::App app("compare");
  app.add_option("--out", out)->allow_extra_args(false);
  app.add_option("--target", target);
  app.add_option("runs", arguments);
  if (!parse_options(app, kText, argc, argv)) return 0;
  if (arguments.empty()) misuse("compare", "no run given");
  if (out.empty()) out = {"report.html"};
  for (const std::string& file : out) {  // before any work
    format_of(file);
    check_output(file, Replace::reports, "choose another name");
    std::error_code error;
    for (const std::string& argument : arguments)
      if (std::filesystem::equivalent(argument, file, error))
        throw UserError("--out: " + file + " is an input; choose another name");
  }
  if (std::ranges::any_of(arguments, is_lab)) {
    if (arguments.size() > 1 || !target.empty() || !std::ranges::all_of(out, is_page))
      misuse("compare",
             "the results.json of netlab stands alone, and its page (.html) is all that is written");
    const std::string page = lab_html(arguments[0]);
    for (const std::string& file : out) write_file(file, page);
    print_reports(out);
    return 0;
  }
  std::vector<Run> runs = read_runs(arguments);
  std::optional<double> wanted;
  if (!target.empty()) wanted = parse_target(target, runs.front().metric);
  const Comparison comparison = compare_runs(std::move(runs), wanted);
  for (const std::string& file : out) write_file(file, format_of(file).text(comparison));
  std::cout << comparison_text(comparison) << "\n";
  print_reports(out);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("compare", run, argc, argv);
}
