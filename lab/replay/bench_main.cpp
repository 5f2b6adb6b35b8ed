// bench --record DIR ... and bench --replay DIR ...: gradients of a real run through the exchange alone. Exit
// codes: 0, 1 for an error, 2 for bad input, 128 + signal if a signal stopped the run.

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "lab/common/options.h"
#include "lab/replay/replay.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/ops/cpu/onednn.h"
#include "train/run_directory.h"
#include "train/setup.h"
#include "train/start.h"

using namespace topknot;

namespace {

constexpr const char* kText =
    "bench: what the exchange of gradients costs, measured without training.\n\n"
    "  bench --record DIR [FILE.yaml] [section.key=value ...] [--steps N]\n"
    "  bench --replay DIR [section.key=value ...] [--steps N] [--meet] [--compute SECONDS] [--out DIR2]\n\n"
    "--record trains as FILE and keys say, and leaves rank 0's gradients of N steps (16), after 20 others\n"
    "(train.record_gradients), in DIR. --replay gives these gradients to any number of ranks, a different "
    "one to\n"
    "each, and has them encoded, exchanged and decoded by any method; nothing is computed. It prints\n"
    "medians over N steps (20) that follow 5 of warm-up.\n\n"
    "  --meet              have all ranks wait, outside of the times, until all have encoded: where ranks\n"
    "                      share cores, communication then is the network's and not the others' encoding\n"
    "  --compute SECONDS   sleep so long in each step in place of the backward pass, so that groups leave\n"
    "                      one after the other and communication can hide behind it (default: 0)\n"
    "  --out DIR2          also write bench.json, metrics.jsonl and config.yaml there\n"
    "  section.key=value   of a replay: compress.*, exchange.*, dist.*, seed, train.threads,\n"
    "                      train.profile_steps, and momentum and lr of the optimizer; 'train --list keys'\n"
    "                      has them\n\n"
    "Ranks start as those of train do: threads, processes (dist.backend=gloo dist.ranks=4), or under\n"
    "torchrun, mpirun, srun or lab/netlab.\n\n"
    "Examples:\n"
    "  bench --record rec lab/configs/netlab/mlp20m.yaml\n"
    "  bench --replay rec dist.ranks=2 compress.name=topk compress.density=0.001\n"
    "  lab/netlab --hosts 16 --rate 100mbit -- build/bin/bench --replay rec dist.backend=gloo \\\n"
    "    compress.name=gaussiank --out out\n";

constexpr std::int64_t kRecordedSteps = 16, kRecordFrom = 20;

struct Arguments {
  std::string record, replay, file, out;
  std::optional<std::int64_t> steps;
  std::optional<double> compute;
  std::vector<std::string> overrides;
  bool meet = false;
};

[[noreturn]] void misuse(const std::string& what) {
  topknot::misuse("bench", what);
}

// False if help was printed.
bool parse(int argc, char** argv, Arguments& arguments) {
  std::vector<std::string> words;
  CLI::App app("bench");
  app.add_option("--record", arguments.record);
  app.add_option("--replay", arguments.replay);
  app.add_option("--steps", arguments.steps);
  app.add_option("--compute", arguments.compute);
  app.add_option("--out", arguments.out);
  app.add_flag("--meet", arguments.meet);
  app.add_option("words", words);
  if (!parse_options(app, kText, argc, argv)) return false;
  for (const std::string& word : words) {
    if (const auto equals = word.find('='); equals != std::string::npos && word.find('/') > equals)
      arguments.overrides.push_back(word);
    else if (arguments.file.empty())
      arguments.file = word;
    else
      misuse("two files given: '" + arguments.file + "' and '" + word + "'");
  }
  if (arguments.record.empty() == arguments.replay.empty())
    misuse("give either --record DIR or --replay DIR");
  if (arguments.steps && (*arguments.steps < 1 || *arguments.steps > 1000000))
    misuse("--steps must be 1 to 1000000");
  if (arguments.compute && !(*arguments.compute >= 0 && *arguments.compute <= 3600))
    misuse("--compute must be 0 to 3600 seconds");
  if (arguments.meet && arguments.compute.value_or(0) > 0)
    misuse("--meet has all groups wait for the last one; leave out --compute");
  return true;
}

LoadedConfig checked(LoadedConfig loaded) {
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  return loaded;
}

// Warns of unused keys on the command line alone; the recording's file lists every key there is.
void warn_of_unused(const Config& recorded, std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), "compress.name=" + recorded.compress.name);
  for (const std::string& line : unused_keys(load_config("", overrides))) log_warning(line);
}

int record(const Arguments& arguments, int argc, char** argv) {
  const auto program_start = std::chrono::steady_clock::now();
  if (arguments.compute) misuse("--compute is for --replay");
  if (arguments.meet) misuse("--meet is for --replay");
  if (!arguments.out.empty()) misuse("--out is for --replay; --record DIR says where the recording goes");
  const std::int64_t steps = arguments.steps.value_or(kRecordedSteps);
  std::vector<std::string> overrides{"train.epochs=0", "train.max_steps=1", "train.eval_every=0"};
  overrides.insert(overrides.end(), arguments.overrides.begin(), arguments.overrides.end());
  LoadedConfig loaded = load_config(arguments.file, overrides);
  std::int64_t from = kRecordFrom;
  if (const auto& given = loaded.config.train.record_gradients; given.size() > 1) from = given[1];
  // The keys that the recording needs come last and override the others.
  overrides.insert(overrides.end(), {"train.epochs=0", fmt::format("train.max_steps={}", from + steps),
                                     fmt::format("train.record_gradients=[{},{}]", steps, from),
                                     "output.dir=" + arguments.record});
  loaded = checked(load_run_config(arguments.file, overrides));
  return start_training(std::move(loaded), argc, argv, false, false, program_start);
}

int replay(const Arguments& arguments, int argc, char** argv) {
  if (!arguments.file.empty())
    misuse("'" + arguments.file + "': a replay takes its configuration from " + arguments.replay +
           ", and keys as section.key=value");
  check_replay_keys(arguments.overrides);
  // All of this before there are ranks, so that a mistake is reported once.
  std::optional<Recording> recording(arguments.replay);
  LoadedConfig loaded = checked(load_config(arguments.replay + "/config.yaml", arguments.overrides));
  ReplayReport report;
  report.recording = arguments.replay;
  if (std::error_code error; std::filesystem::equivalent(arguments.replay, arguments.out, error))
    throw UserError("--out: " + arguments.out + " is the recording; choose another folder");
  report.recorded_steps = recording->steps();
  report.options.steps = arguments.steps.value_or(report.options.steps);
  report.options.meet = arguments.meet;
  report.options.compute_s = arguments.compute.value_or(0);

  const DistOptions options = dist_options(loaded);
  const LaunchPlan plan = plan_launch(options, process_environment());
  const bool spawned_rank = plan.kind == LaunchPlan::Kind::process && plan.launcher == "spawn";
  if (plan.rank == 0 && !spawned_rank) warn_of_unused(recording->config(), arguments.overrides);
  loaded.config.dist.ranks = plan.size;
  loaded.config.train.record_gradients.clear();
  loaded.config.output.dir = arguments.out;
  if (plan.kind == LaunchPlan::Kind::threads) settle_backend(loaded, plan, nullptr);
  report.options.trace_folder = arguments.out;
  RunDirectory folder;  // held until the end
  StartHooks hooks;
  // Replay runs on the host, whatever GPUs there are.
  hooks.joined = [&](Communicator& host) { loaded.config.dist.backend = host.backend(); };
  hooks.load = [&] {};
  hooks.check = [&] { check_replay(*recording, loaded.config); };
  hooks.make_directory = [&] {
    if (arguments.out.empty()) return;
    folder = create_run_directory(loaded, {argv, argv + argc}, {{"oneDNN", onednn_version()}});
  };
  hooks.body = [&](Communicator& communicator) {
    const ReplayResult result = replay_rank(*recording, loaded.config, report.options, communicator);
    if (communicator.rank() != 0) return;
    ReplayReport mine = report;
    mine.config = loaded.config;
    mine.backend = communicator.network();
    if (spawned_rank && !arguments.out.empty())
      RunLock::of_parent(arguments.out);
    else if (folder.lock)
      folder.lock->check();
    write_replay(arguments.out, mine, result);
    std::fputs(replay_table(mine, result).c_str(), stdout);
  };
  return start_ranks(plan, options, argv, hooks);
}

int run(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 0;
  return arguments.record.empty() ? replay(arguments, argc, argv) : record(arguments, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(nullptr, run, argc, argv);
}
