// train [FILE.yaml] [section.key=value ...]: the front door to a run; train export. Exit codes: 0, 1 for an error, 2 for
// bad input, 128 + signal where a signal stopped the run.
#include <cstdio>
#include <functional>
#include <string_view>

#include "dist/launch/launch.h"
#include "nn/core/base/log.h"
#include "nn/core/base/program.h"
#include "train/checkpoint/export.h"
#include "train/config/cli.h"
#include "train/network_check.h"
#include "train/setup.h"
#include "train/start.h"
#include "train/status.h"

using namespace topknot;

namespace {

// Everything that can be wrong without training a step.
std::vector<Problem> all_problems(const LoadedConfig& loaded) {
  std::vector<Problem> problems = loaded.problems;
  for (Problem& problem : check_config(loaded.config)) problems.push_back(std::move(problem));
  if (!problems.empty()) return problems;
  const auto attempt = [&](const std::function<void()>& check) {
    try {
      check();
    } catch (const UserError& error) {
      problems.push_back({"", error.what()});
    }
  };
  attempt([&] { parse_device(loaded.config.train.device); });
  attempt([&] {
    const LaunchPlan plan = plan_launch(dist_options(loaded), process_environment());
    Config config = loaded.config;  // as a run would have it
    if (plan.kind == LaunchPlan::Kind::threads) config.dist.backend = "threads";
    throw_problems(check_config(config));
  });
  attempt([&] {
    const RunData data = load_data(loaded.config);
    check_run(loaded.config, data);
  });
  return problems;
}

void warn_of_unused_keys(const LoadedConfig& loaded) {
  for (const std::string& line : unused_keys(loaded)) log_warning(line);
}

int run(int argc, char** argv) {
  const auto program_start = std::chrono::steady_clock::now();
  if (argc > 1 && std::string_view(argv[1]) == "status") return status_command(argc - 1, argv + 1);
  if (argc > 1 && std::string_view(argv[1]) == "export") return export_command(argc - 1, argv + 1);
  const CommandLine line = parse_command_line(argc, argv);
  if (!line.text.empty()) {
    std::fputs(line.text.c_str(), stdout);
    return 0;
  }
  if (line.quiet || line.brief) set_log_level(LogLevel::warning);
  if (line.verbose) set_log_level(LogLevel::debug);

  LoadedConfig loaded = line.resume.empty() ? load_config(line.file, line.overrides)
                                            : load_resumed_config(line.resume, line.overrides);
  if (line.validate) {
    throw_problems(all_problems(loaded));
    warn_of_unused_keys(loaded);
    std::puts("the configuration is valid");
    return 0;
  }
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  if (line.dump_config) {
    std::fputs(dump_yaml(loaded.config, false, loaded.origins).c_str(), stdout);
    return 0;
  }
  if (line.dry_run) {
    warn_of_unused_keys(loaded);
    print_dry_run(loaded.config);
    return 0;
  }
  if (line.check_network) return start_network_check(loaded, argv);

  return start_training(std::move(loaded), argc, argv, line.quiet, !line.resume.empty(), program_start);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(nullptr, run, argc, argv);
}
