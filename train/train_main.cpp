// train [FILE.yaml] [section.key=value ...]: the front door to a run. Exit codes: 0, 1 for an error, 2 for
// bad input, 128 + signal where a signal stopped the run.
#include <cstdio>
#include <exception>

#include "compress/code/code.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "dist/launch.h"
#include "dist/threads_communicator.h"
#include "nn/core/check.h"
#include "nn/core/log.h"
#include "nn/ops/onednn.h"
#include "train/cli.h"
#include "train/stop.h"
#include "train/trainer.h"

using namespace topknot;

namespace {

constexpr double kGraceSeconds = 5;  // for the other ranks to end by themselves when one has died

void print_names(const std::vector<std::string>& names,
                 const std::function<std::string(const std::string&)>& help) {
  for (const std::string& name : names) std::printf("%-20s %s\n", name.c_str(), help(name).c_str());
}

template <class R>
void print_registry(const R& registry) {
  print_names(registry.names(), [&](const std::string& name) { return registry.help(name); });
}

void print_list(const std::string& kind) {
  if (kind == "models") return print_registry(models());
  if (kind == "datasets") return print_registry(datasets());
  if (kind == "compressors") return print_registry(compressors());
  if (kind == "selections") return print_registry(selectors());
  if (kind == "memories") return print_registry(memories());
  if (kind == "codes") return print_registry(index_codes());
  if (kind == "values") return print_registry(value_codes());
  if (kind == "optimizers") return print_registry(optimizers());
  if (kind == "schedules") return print_registry(schedules());
  std::fputs((kind == "keys" ? key_help() : key_reference_markdown()).c_str(), stdout);
}

DistOptions dist_options(const LoadedConfig& loaded) {
  const auto& dist = loaded.config.dist;
  DistOptions options;
  options.backend = dist.backend;
  const auto origin = loaded.origins.find("dist.ranks");
  if (origin != loaded.origins.end() && origin->second != Origin::default_value) {
    options.ranks = dist.ranks;
    options.ranks_insist = origin->second == Origin::command_line;
  }
  options.master = dist.master;
  options.interface = dist.interface;
  options.timeout_s = dist.timeout_s;
#ifdef TOPKNOT_CHECK_CALLS
  options.check_calls = true;
#endif
  return options;
}

// Everything that can be wrong without training a step.
std::vector<Problem> all_problems(const LoadedConfig& loaded) {
  std::vector<Problem> problems = loaded.problems;
  for (Problem& problem : check_config(loaded.config, known_names())) problems.push_back(std::move(problem));
  if (!problems.empty()) return problems;
  const auto attempt = [&](const std::function<void()>& check) {
    try {
      check();
    } catch (const UserError& error) {
      problems.push_back({"", error.what()});
    }
  };
  attempt([&] { parse_device(loaded.config.train.device); });
  attempt([&] { plan_launch(dist_options(loaded), process_environment()); });
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
  const CommandLine line = parse_command_line(argc, argv);
  if (!line.text.empty()) {
    std::fputs(line.text.c_str(), stdout);
    return 0;
  }
  if (!line.list.empty()) {
    print_list(line.list);
    return 0;
  }
  if (line.quiet) set_log_level(LogLevel::warning);
  if (line.verbose) set_log_level(LogLevel::debug);

  LoadedConfig loaded = load_config(line.file, line.overrides);
  if (line.validate) {
    throw_problems(all_problems(loaded));
    warn_of_unused_keys(loaded);
    std::puts("the configuration is valid");
    return 0;
  }
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config, known_names()));
  if (line.dump_config) {
    std::fputs(dump_yaml(loaded.config, false, loaded.origins).c_str(), stdout);
    return 0;
  }
  if (line.dry_run) {
    warn_of_unused_keys(loaded);
    print_dry_run(loaded.config);
    return 0;
  }

  const DistOptions options = dist_options(loaded);
  const LaunchPlan plan = plan_launch(options, process_environment());
  // Once, not by every process.
  const bool spawned_rank = plan.kind == LaunchPlan::Kind::process && plan.launcher == "spawn";
  if (plan.rank == 0 && !spawned_rank) warn_of_unused_keys(loaded);
  loaded.config.dist.ranks = plan.size;
  if (loaded.config.output.dir.empty()) loaded.config.output.dir = run_folder_name(loaded.config);
  RunFolder folder{loaded.config.output.dir};
  RunData data;
  // Mistakes must show before there is a run folder, which would be in the corrected run's way.
  const auto load = [&] { data = load_data(loaded.config); };
  const auto check = [&] { check_run(loaded.config, data); };
  const auto make_folder = [&] {
    folder = create_run_folder(loaded, {argv, argv + argc}, {{"oneDNN", onednn_version()}});
  };
  if (plan.kind == LaunchPlan::Kind::spawn) {
    load();
    check();
    return run_spawned(plan, options, argv, kGraceSeconds, make_folder);
  }

  install_stop_handlers();
  RunOutcome outcome;  // rank 0's, or this process's
  const auto body = [&](Communicator& communicator) {
    const RunInputs inputs{loaded.config, data, folder, line.quiet, program_start};
    const RunOutcome mine = run_rank(inputs, communicator);
    if (communicator.rank() == plan.rank) outcome = mine;
  };
  if (plan.kind == LaunchPlan::Kind::threads) {
    load();
    check();
    make_folder();
    run_thread_ranks(plan.size, options.timeout_s, body);
  } else {
    // Inside the group, so that the other ranks learn at once where this one fails.
    run_process_rank(plan, options, [&](Communicator& communicator) {
      load();
      const bool spawned = plan.launcher == "spawn";  // then the launcher has made the folder
      if (plan.rank == 0 && !spawned) {
        check();
        make_folder();
      }
      body(communicator);
    });
  }
  return outcome.interrupted ? 128 + stop_signal() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const UserError& error) {
    log_error(error.what());
    return 2;
  } catch (const std::exception& error) {
    log_error(error.what());
    return 1;
  }
}
