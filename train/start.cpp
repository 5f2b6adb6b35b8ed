#include "train/start.h"

#include <fmt/format.h>

#include <algorithm>

#include "dist/comm/communicator.h"
#include "dist/launch/coordinate.h"
#include "nn/base/checksum.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "nn/ops/cpu/onednn.h"
#include "train/checkpoint/checkpointer.h"
#include "train/checkpoint/model_file.h"
#include "train/checks.h"
#include "train/plan/choose.h"

namespace topknot {
namespace {

constexpr double kGraceSeconds = 5;  // for the other ranks to end by themselves when one has died

// A build with CUDA that does not use a GPU says why.
void log_fallback(const std::string& device) {
  if (device != "auto" || !built_with_cuda()) return;
  if (const std::string why = cuda_problem(); !why.empty())
    log_info("train.device: auto takes the CPU: " + why);
}

double data_bytes(const Dataset& data) {
  if (data.on_disk()) return 0;
  if (data.task() == Task::language_model) return sizeof(std::int32_t) * static_cast<double>(data.size());
  if (data.on_demand()) return 0;
  const double values = static_cast<double>(data.sample_shape().numel());
  return static_cast<double>(data.size()) * (data.size() > 0 && data.bytes(0) ? values : 4 * values);
}

}  // namespace

// The same for a rank that is started again, unless files have changed.
std::string run_fingerprint(const Config& config, const DataFingerprint& data) {
  Checksum checksum;
  for (const auto& values : {config_values(config), data})
    for (const auto& [name, value] : values) {
      const std::string line = name + "=" + value + "\n";
      checksum.update(std::as_bytes(std::span(line)));
    }
  return fmt::format("{:016x}", checksum.value());
}

DistOptions dist_options(const LoadedConfig& loaded) {
  const auto& dist = loaded.config.dist;
  if (dist.backend != "auto")
    if (const Backend& backend = backends().find(dist.backend); backend.problem)
      if (const std::string why = backend.problem(); !why.empty())
        throw UserError(fmt::format("dist.backend: {} needs {}, but {}; dist.backend=gloo works without",
                                    dist.backend, backend.needs, why));
  DistOptions options;
  static_cast<DistKeys&>(options) = dist;
  options.min_ranks = loaded.config.elastic.min_ranks;
  options.respawns = loaded.config.elastic.respawns;
  const auto origin = loaded.origins.find("dist.ranks");
  if (origin != loaded.origins.end() && origin->second != Origin::default_value) {
    options.ranks = dist.ranks;
    options.ranks_insist = origin->second == Origin::command_line;
  }
  if (!dist.link_rate.empty())
    options.link =
        make_emulated_link(dist.link_rate, dist.link_latency, loaded.config.exchange.ranks_per_host);
#ifdef TOPKNOT_CHECK_CALLS
  options.check_calls = true;
#endif
  return options;
}

void settle_backend(LoadedConfig& loaded, const LaunchPlan& plan, Communicator* host) {
  std::string& backend = loaded.config.dist.backend;
  if (backend != "auto") return;
  BackendChoice choice{"threads", "no launcher started several processes"};
  if (host) {
    std::string problem = loaded.config.train.device == "cpu" ? "train.device is cpu" : cuda_problem();
    Config with_nccl = loaded.config;
    with_nccl.dist.backend = "nccl";
    if (problem.empty())
      if (const auto problems = check_config(with_nccl); !problems.empty())
        problem = problems.front().message;
    choice = choose_backend(*host, problem, problem.empty() ? gpu_place(gpu_of(plan, gpu_count())) : "");
    choice.reason = fmt::format("{} started {} processes; {}", plan.launcher, plan.size, choice.reason);
  }
  backend = choice.backend;
  loaded.origins["dist.backend"] = Origin::chosen;
  if (plan.rank == 0) log_info(fmt::format("dist.backend: auto takes {}: {}", choice.backend, choice.reason));
  throw_problems(check_config(loaded.config));  // what goes with one backend only
}

int start_ranks(const LaunchPlan& plan, const DistOptions& options, char* const* argv,
                const StartHooks& hooks) {
  switch (plan.kind) {
    case LaunchPlan::Kind::spawn:
      hooks.load();
      hooks.check();
      return run_spawned(plan, options, argv, kGraceSeconds, hooks.make_directory);
    case LaunchPlan::Kind::threads:
      hooks.load();
      hooks.check();
      hooks.make_directory();
      run_thread_ranks(plan.size, options.timeout_s, hooks.body, options.link);
      return 0;
    case LaunchPlan::Kind::process:
      if (plan.joins_after > 0) {
        hooks.load();
        hooks.join();
        return 0;
      }
      // Inside the group, so that the other ranks learn at once if this one fails.
      run_process_rank(plan, options, [&](Communicator& communicator) {
        if (hooks.joined) hooks.joined(communicator);
        hooks.load();
        if (plan.launcher != "spawn") {  // whose launcher has made the folder
          hooks.check();
          if (plan.rank == 0) hooks.make_directory();
        }
        hooks.body(communicator);
      });
      return 0;
  }
  return 1;
}

LoadedConfig load_run_config(const std::string& file, const std::vector<std::string>& overrides) {
  LoadedConfig loaded = load_config(file, overrides);
  adopt_architecture(loaded);
  return loaded;
}

LoadedConfig load_resumed_config(const std::string& run, const std::vector<std::string>& overrides) {
  const std::string file = run + "/config.yaml";
  std::error_code error;
  if (!std::filesystem::exists(file, error))
    throw UserError(fmt::format("{} is no run directory: it has no config.yaml", run));
  for (const std::string& override : overrides)
    if (override.rfind("output.", 0) == 0)
      throw UserError(fmt::format("--resume: the run goes on in {}; leave {} out", run, override));
  LoadedConfig loaded = load_config(file, overrides);
  loaded.config.output.dir = run;
  loaded.resumed = true;
  keep_choice({run}, loaded);
  // The file holds defaults and the method's settings too; they count as not given.
  const Config defaults, of_method = method_defaults(loaded.config);
  for (auto& [name, origin] : loaded.origins) {
    const Key& key = *find_key(name);
    const std::string value = key_value(key, loaded.config);
    if (origin == Origin::file && value == key_value(key, of_method))
      origin = value == key_value(key, defaults) ? Origin::default_value : Origin::method;
  }
  return loaded;
}

double batches_bytes(const Config& config, const Dataset& data) {
  const double batch = 4.0 * static_cast<double>(data.sample_shape().numel()) * config.data.batch_size;
  return (config.data.workers > 0 ? LoaderOptions().prefetch : 1) * batch;
}

double model_bytes(const Config& config, const Dataset& data) {
  if (parse_device(config.train.device).kind != DeviceKind::cpu) return 0;
  const double moments = config.optimizer.name == "muon" || config.optimizer.name == "adamw" ? 2
                         : config.optimizer.momentum > 0                                     ? 1
                                                                                             : 0;
  double floats = 0;
  const auto model = register_model(config, data);
  for (const auto& parameter : model->store.parameters())
    floats += (matches_any(config.model.freeze, parameter->name()) ? 1 : 3 + moments) *
              static_cast<double>(parameter->numel());
  return 4 * floats;
}

void check_limits(const Config& config, const RunData& data, int ranks, int processes) {
  const double workers = config.data.workers;
  // Training and evaluation have workers each; then the rank's own, its compute threads and the collectives'
  // one.
  const double threads = ranks * (2 * workers + compute_threads(config) + 1);
  if (threads > thread_limit())
    throw UserError(
        fmt::format("dist.ranks: {} with data.workers={} need {:.0f} threads, and this machine allows {:.0f} "
                    "(ulimit -u, the kernel or the container); lower either",
                    count_text(ranks, "rank"), config.data.workers, threads, thread_limit()));

  const double batches = batches_bytes(config, *data.train);
  const double model = model_bytes(config, *data.train);
  const double samples = data_bytes(*data.train) + data_bytes(*data.test);
  const double all = ranks * (model + batches) + processes * samples;
  if (all > memory_limit())
    throw UserError(fmt::format(
        "dist.ranks: {} on this machine, which has {} of memory, would need {} or more: {} of weights, "
        "gradients and "
        "momenta and {} of batches per rank, {} of samples per process; lower dist.ranks, data.batch_size or "
        "data.train_size, or take a smaller model",
        count_text(ranks, "rank"), format_bytes(memory_limit()), format_bytes(all), format_bytes(model),
        format_bytes(batches), format_bytes(samples)));

  // A process that is started is as large as this one, samples included, when it begins.
  const double stacks = threads / processes * stack_bytes();
  const double more = ranks / processes * (model + batches) + stacks;
  if (more > address_room())
    throw UserError(fmt::format(
        "out of memory: the process needs {} or more of address space beside what it has ({} of weights, "
        "gradients and momenta, {} of batches, {} of the stacks of threads), and the limit (ulimit -v or -d) "
        "leaves {}; raise the limit, or lower dist.ranks, data.workers, data.batch_size or train.threads",
        format_bytes(more), format_bytes(ranks / processes * model),
        format_bytes(ranks / processes * batches), format_bytes(stacks),
        format_bytes(std::max(0.0, address_room()))));
}

int start_training(LoadedConfig loaded, int argc, char* const* argv, bool quiet, bool resume,
                   std::chrono::steady_clock::time_point program_start) {
  DistOptions options = dist_options(loaded);
  LaunchPlan plan = plan_launch(options, process_environment());
  if (options.min_ranks > 0 && plan.launcher != "spawn" && !plan.coordinated)
    throw UserError("elastic.min_ranks: is for several ranks that are processes; leave it out");
  // One process alone prints the warnings.
  const bool spawned_rank = plan.kind == LaunchPlan::Kind::process && plan.launcher == "spawn";
  if (plan.rank == 0 && !spawned_rank) {
    for (const std::string& line : unused_keys(loaded)) log_warning(line);
    log_fallback(loaded.config.train.device);
  }
  loaded.config.dist.ranks = plan.size;
  if (std::string& precision = loaded.config.train.precision; precision == "tf32" && !on_gpu(loaded.config))
    precision = "fp32";
  // Named before `auto` is resolved: a choice of the run is no key that differs from its default.
  if (loaded.config.output.dir.empty()) loaded.config.output.dir = run_directory_name(loaded.config);
  if (std::string& merge = loaded.config.exchange.merge; merge == "auto" && !chooses_method(loaded.config)) {
    merge = resolve_merge(merge, compresses(loaded.config), loaded.config.compress.scope);
    loaded.origins["exchange.merge"] = Origin::chosen;
  }
  if (plan.kind == LaunchPlan::Kind::threads) settle_backend(loaded, plan, nullptr);
  RunDirectory folder{loaded.config.output.dir};
  RunData data;
  if (plan.kind != LaunchPlan::Kind::spawn) install_stop_handlers();
  std::optional<Member> member;
  if (plan.coordinated) member.emplace(plan, options);
  RunOutcome outcome;  // rank 0's, or this process's
  StartHooks hooks;
  Communicator* group = nullptr;
  hooks.joined = [&](Communicator& host) {
    group = &host;
    settle_backend(loaded, plan, &host);
  };
  // Ends the group if a long phase, or one that hangs in a file system, is interrupted.
  const auto last_words = [&](const std::string& text) {
    if (!group) return;
    set_log_rank(plan.rank, plan.size);  // of the thread that calls this
    group->abort(text);
  };
  // Errors must show before there is a run directory, which would block the corrected run.
  hooks.load = [&] {
    check_device(loaded.config);
    const EndAfterSignal guard("while the data were read", {}, last_words);
    data = load_data(loaded.config);
  };
  hooks.check = [&] {
    const EndAfterSignal guard("while the run was checked", {}, last_words);
    const bool alone =
        plan.kind == LaunchPlan::Kind::process;  // where the others are is the launcher's business
    check_limits(loaded.config, data, alone ? 1 : plan.size,
                 plan.kind == LaunchPlan::Kind::spawn ? plan.size : 1);
    const RunCheck check = check_run(loaded.config, data, !resume);
    throw_problems(check.problems);
    const bool others_may_join = member || (options.respawns > 0 && plan.kind == LaunchPlan::Kind::spawn);
    const DataFingerprint mine =
        group || resume || others_may_join ? data_fingerprint(data) : DataFingerprint();
    if (others_may_join) options.run = run_fingerprint(loaded.config, mine);
    if (group) {
      check_same_configuration(*group, loaded.config);
      check_same_data(*group, mine);
    }
    if (plan.rank != 0) return;
    for (const std::string& line : check.warnings) log_warning(line);
    const RunDirectory run{loaded.config.output.dir};
    if (resume) check_resumable(CheckpointStore(run.checkpoints()), loaded.config, mine);
  };
  hooks.make_directory = [&] {
    const EndAfterSignal guard("while the run directory was made", {}, last_words);
    folder = resume ? open_run_directory(loaded.config.output.dir)
                    : create_run_directory(loaded, {argv, argv + argc}, {{"oneDNN", onednn_version()}});
  };
  View joined;
  hooks.body = [&](Communicator& communicator) {
    if (spawned_rank && communicator.rank() == 0)
      folder.lock = std::make_shared<RunLock>(RunLock::of_parent(folder.path));
    if (member && joined.ranks.empty()) member->tell_run(options.run);
    RunInputs inputs{loaded.config, data, folder, quiet, program_start, loaded.origins};
    inputs.view = joined;
    inputs.coordinated = plan.coordinated;
    inputs.resume = resume;
    if (options.min_ranks > 0) inputs.rejoin = make_rejoin(plan, options);
    inputs.gpu = gpu_of(plan, gpu_count());
    if (loaded.config.dist.backend == "nccl")
      if (const int cores = keep_to_cores_near(gpu_bus(inputs.gpu)); cores > 0)
        log_debug(fmt::format("rank {} keeps to the {} cores next to GPU {}", plan.rank, cores, inputs.gpu));
    const RunOutcome mine = run_rank(inputs, communicator);
    if (communicator.rank() == plan.rank || !joined.ranks.empty()) outcome = mine;
  };
  hooks.join = [&] {
    options.run = run_fingerprint(loaded.config, data_fingerprint(data));
    const auto communicator = join_run(plan, options, joined);
    if (communicator) hooks.body(*communicator);
  };
  try {
    if (const int code = start_ranks(plan, options, argv, hooks); code != 0) return code;
  } catch (const std::exception& error) {
    if (member) member->set_exit_code(exit_code_of(error));
    throw;
  }
  if (!outcome.result.empty()) std::puts(outcome.result.c_str());
  const int code = outcome.stop_signal ? 128 + outcome.stop_signal : 0;
  if (member) member->set_exit_code(code);
  return code;
}

int start_coordinator(const LoadedConfig& loaded, const std::string& where) {
  const DistOptions options = dist_options(loaded);
  if (options.min_ranks == 0)
    throw UserError("--coordinate is for elastic runs: give elastic.min_ranks, the fewest ranks that go on");
  return coordinate(parse_host_port(where, "--coordinate"), loaded.config.dist.ranks, options, kGraceSeconds);
}

}  // namespace topknot
