#include <algorithm>

#include "tools/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

const char* const kPlain = "ops and compressors against the CPU";

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Adds the failed assertions, so that the report suffices without the log.
void add_failed_assertions(const std::string& output, Report& report) {
  int shown = 0;
  for (const std::string& line : lines_of(output))
    if (const auto at = line.find(": FAILED:"); at != std::string::npos && ++shown <= 20)
      report.add({"tests", line.substr(0, std::min<std::size_t>(at, 200)), Status::failed});
}

void run_plain(const std::string& program, double seconds, Report& report) {
  const Outcome outcome = run({{program, "--durations", "no"}}, seconds);
  Result result{"tests", kPlain, Status::passed, outcome.seconds, {}, outcome.last_line()};
  // A status of 0 also comes from a program in which no test was chosen.
  if (outcome.ok() && has(outcome.output, "All tests passed")) {
    report.add(std::move(result));
    return;
  }
  report.add(failure(std::move(result), outcome,
                     outcome.ok() ? "it does not say that all tests passed: " + outcome.last_line()
                                  : outcome.reason(program)));
  add_failed_assertions(outcome.output, report);
}

Result checked_result(const std::string& name, const Outcome& outcome) {
  Result result{"tests", name, Status::passed, outcome.seconds, {}, outcome.last_line()};
  const bool clean =
      has(outcome.output, "ERROR SUMMARY: 0 errors") || has(outcome.output, "RACECHECK SUMMARY: 0 hazards");
  const bool summed_up = has(outcome.output, "ERROR SUMMARY:") || has(outcome.output, "RACECHECK SUMMARY:");
  const bool found_something =
      has(outcome.output, "========= Invalid") || has(outcome.output, "========= Error: ");
  if (outcome.ok() && clean && has(outcome.output, "All tests passed")) return result;
  if (found_something || (summed_up && !outcome.timed_out))
    return failure(std::move(result), outcome, outcome.reason("compute-sanitizer"));
  // Without a summary the tool did not work here: some machines forbid debugging interfaces, and it may be slow.
  // That is no result about our code.
  result.status = Status::skipped;
  result.note = outcome.reason("compute-sanitizer");
  return result;
}

// cuDNN's and cuBLAS's kernels synchronise in ways that these tools take for hazards, and take most of the time. The option that
// leaves them out has had two names.
std::vector<std::string> own_kernels_only(const std::string& sanitizer) {
  const std::string help = run({{sanitizer, "--help"}}, 20).output;
  if (has(help, "--kernel-name")) return {"--kernel-name", "kernel_substring=topknot"};
  if (has(help, "--kernel-regex")) return {"--kernel-regex", "kns=topknot"};
  return {};
}

}  // namespace

void run_tests(const Options& options, Report& report) {
  const StageClock clock(options.seconds);
  const std::string program = options.bin + "/gpu_tests";
  if (!is_program(program)) return skip_all("tests", program + " is not there", report);
  run_plain(program, 0.5 * clock.left(), report);
  const std::string sanitizer = find_program(options.sanitizer, "/usr/local/cuda/bin");
  double share = 0.5;
  for (const std::string tool : {"memcheck", "racecheck", "synccheck"}) {
    const std::string name = "the same under compute-sanitizer " + tool;
    if (sanitizer.empty() || clock.used_up()) {
      report.add({"tests",
                  name,
                  Status::skipped,
                  0,
                  {},
                  sanitizer.empty() ? "compute-sanitizer is not on the PATH" : kUsedUp});
      continue;
    }
    std::vector<std::string> command{sanitizer, "--tool", tool, "--error-exitcode", "9"};
    if (tool != "memcheck")
      for (const std::string& word : own_kernels_only(sanitizer)) command.push_back(word);
    command.insert(command.end(), {program, "~[slow]"});
    const Outcome checked = run({command}, share * clock.left());
    report.add(checked_result(name, checked));
    share = tool == "memcheck" ? 0.6 : 1;
  }
}

}  // namespace topknot::gpu_check
