// train [FILE.yaml] [section.key=value ...]: the front door to a run; train export, sample, status. Exit codes:
// 0, 1 for an error, 2 for bad input, 3 for a training that diverged, 128 + signal where a signal stopped the run.
#include <cstdio>
#include <optional>
#include <string_view>

#include "dist/launch/launch.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "train/checkpoint/model_file.h"
#include "train/config/config.h"
#include "train/network_check.h"
#include "train/run_directory.h"
#include "train/sample.h"
#include "train/setup.h"
#include "train/start.h"

using namespace topknot;

namespace {

// The problems that the configuration alone shows. Keys that could not be read have their defaults, so
// further problems of theirs are left out.
std::vector<Problem> config_problems(const LoadedConfig& loaded) {
  std::vector<Problem> problems = loaded.problems;
  for (const Problem& problem : check_config(loaded.config))
    if (!depends_on_invalid_key(loaded.problems, {problem.key})) problems.push_back(problem);
  return problems;
}

// Everything that can be wrong without training a step; `warnings` receives what is no mistake.
std::vector<Problem> all_problems(LoadedConfig loaded, std::vector<std::string>& warnings) {
  std::vector<Problem> problems = loaded.problems;
  std::optional<LaunchPlan> plan;
  add_problem(problems, {"dist.backend", "dist."}, [&] {
    plan = plan_launch(dist_options(loaded), process_environment());
    if (plan->kind == LaunchPlan::Kind::threads)
      loaded.config.dist.backend = "threads";  // as a run would have it
    loaded.config.dist.ranks = plan->size;
  });
  loaded.problems = problems;
  problems = config_problems(loaded);
  if (problems.empty()) warnings = unused_keys(loaded);
  add_problem(problems, {"train.device", "train.precision"}, [&] { check_device(loaded.config); });
  RunData data;
  add_problem(problems, {"data.", "seed"}, [&] { data = load_data(loaded.config); });
  if (!data.test) return problems;
  const RunCheck check = check_run(loaded.config, data, true, problems);
  problems.insert(problems.end(), check.problems.begin(), check.problems.end());
  warnings.insert(warnings.end(), check.warnings.begin(), check.warnings.end());
  if (plan)
    add_problem(problems,
                {"dist.ranks", "model.", "data.", "compress.dense_1d", "train.device", "train.threads"}, [&] {
                  const bool alone = plan->kind == LaunchPlan::Kind::process;
                  check_limits(loaded.config, data, alone ? 1 : plan->size,
                               plan->kind == LaunchPlan::Kind::spawn ? plan->size : 1);
                });
  return problems;
}

void log_warnings(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) log_warning(line);
}

int run(int argc, char** argv) {
  const auto program_start = std::chrono::steady_clock::now();
  if (argc > 1 && std::string_view(argv[1]) == "status") return status_command(argc - 1, argv + 1);
  if (argc > 1 && std::string_view(argv[1]) == "export") return export_command(argc - 1, argv + 1);
  if (argc > 1 && std::string_view(argv[1]) == "sample") return sample_command(argc - 1, argv + 1);
  const CommandLine line = parse_command_line(argc, argv);
  if (!line.text.empty()) {
    std::fputs(line.text.c_str(), stdout);
    return 0;
  }
  if (line.quiet || line.brief) set_log_level(LogLevel::warning);
  if (line.verbose) set_log_level(LogLevel::debug);

  LoadedConfig loaded = line.resume.empty() ? load_run_config(line.file, line.overrides)
                                            : load_resumed_config(line.resume, line.overrides);
  if (line.validate) {
    std::vector<std::string> warnings;
    throw_problems(all_problems(loaded, warnings));
    log_warnings(warnings);
    std::puts("the configuration is valid");
    return 0;
  }
  throw_problems(config_problems(loaded));
  if (line.dump_config) {
    log_warnings(unused_keys(loaded));
    std::fputs(dump_yaml(loaded.config, false, loaded.origins, keys_without_use(loaded.config)).c_str(),
               stdout);
    return 0;
  }
  if (line.dry_run) {
    log_warnings(unused_keys(loaded));
    print_dry_run(loaded);
    return 0;
  }
  if (!line.coordinate.empty()) return start_coordinator(loaded, line.coordinate);
  if (line.check_network) return start_network_check(loaded, argv);

  return start_training(std::move(loaded), argc, argv, line.quiet, !line.resume.empty(), program_start);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(nullptr, run, argc, argv);
}
