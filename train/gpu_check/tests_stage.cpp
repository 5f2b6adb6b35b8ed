#include <algorithm>

#include "train/gpu_check/process.h"
#include "train/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

Result result_of(const std::string& name, const Outcome& outcome) {
  Result result{"tests", name, outcome.ok() ? Status::passed : Status::failed, outcome.seconds};
  result.note = outcome.timed_out ? "not done in its time" : outcome.last_line();
  return result;
}

}  // namespace

void run_tests(const Options& options, Report& report) {
  const std::string program = options.bin + "/gpu_tests";
  if (!is_program(program)) {
    report.add(
        {"tests", "ops and compressors against the CPU", Status::skipped, 0, {}, program + " is not there"});
    return;
  }
  const Outcome plain = run({{program, "--durations", "no"}}, 0.5 * options.seconds);
  report.add(result_of("ops and compressors against the CPU", plain));
  if (!plain.ok()) {
    // Which ones: each failed case once, so that the report says enough without the log.
    std::size_t at = 0;
    for (int shown = 0; shown < 20 && (at = plain.output.find(": FAILED:", at)) != std::string::npos;
         ++shown) {
      const std::size_t line = plain.output.rfind('\n', at) + 1;
      report.add(
          {"tests", plain.output.substr(line, std::min<std::size_t>(at - line, 200)), Status::failed, 0});
      ++at;
    }
  }
  for (const std::string tool : {"memcheck", "racecheck"}) {
    const std::string name = "the same under compute-sanitizer " + tool;
    if (!is_program("compute-sanitizer")) {
      report.add({"tests", name, Status::skipped, 0, {}, "compute-sanitizer is not on the PATH"});
      continue;
    }
    const Outcome checked =
        run({{"compute-sanitizer", "--tool", tool, "--error-exitcode", "9", program, "~[slow]"}},
            0.25 * options.seconds);
    Result result = result_of(name, checked);
    // Some machines forbid debugging interfaces; that says nothing about our code.
    if (checked.output.find("not supported") != std::string::npos ||
        checked.output.find("Unable to") != std::string::npos || checked.timed_out)
      result.status = Status::skipped;
    report.add(result);
  }
}

}  // namespace topknot::gpu_check
