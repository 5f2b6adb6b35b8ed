#include "train/checkpoint/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "compress/memory/memory.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// Whether a key may change between two starts of a run: where and how long it runs, and what it reports.
bool may_change(const Key& key) {
  static const std::set<std::string> others = {"data.on_device",
                                               "dist.backend",
                                               "dist.bind_cores",
                                               "dist.link.rate",
                                               "dist.link.latency",
                                               "dist.ranks",
                                               "dist.timeout_s",
                                               "exchange.profile",
                                               "data.max_bad_files",
                                               "train.epochs",
                                               "train.max_steps",
                                               "train.threads",
                                               "train.device",
                                               "train.graphs",
                                               "train.step_times",
                                               "train.eval_every",
                                               "train.target_accuracy",
                                               "train.log_every",
                                               "train.check_every",
                                               "train.max_skips",
                                               "train.checkpoint_every",
                                               "train.checkpoint_keep",
                                               "train.record_gradients",
                                               "train.record_from",
                                               "train.distribution_every",
                                               "train.profile_steps",
                                               "train.profile_from"};
  return key.scope != KeyScope::run || others.count(key.name) > 0;
}

void check_config_of(const Manifest& manifest, const Config& config, bool root) {
  std::vector<std::string> refused, changed;
  const std::set<std::string> without_use = keys_without_use(config);
  for (const auto& [key, now] : config_values(config)) {
    if (key == "train.stop_after" || key.rfind("output.", 0) == 0 || without_use.count(key)) continue;
    const auto then = manifest.config.find(key);
    if (then == manifest.config.end() || then->second == now) continue;
    if (const Key& known = *find_key(key); known.secret) {  // an earlier version's manifest has the value
      if (root && now == key_value(known, Config()))
        log_info(fmt::format("resume: {} was given before and is not now; give it again if the ranks need it",
                             key));
      continue;
    }
    // What a GPU computed in tf32 goes on in fp32 on a CPU, as a run that begins there does.
    if (key == "train.precision" && then->second == "tf32" && now == "fp32" && !on_gpu(config)) continue;
    (may_change(*find_key(key)) ? changed : refused)
        .push_back(fmt::format("{}: {}, was {}", key, now, one_line(then->second)));
  }
  if (!refused.empty())
    throw UserError(
        fmt::format("the run cannot go on with other values of keys that decide what it computes:\n  {}\n"
                    "leave them as they were, or begin a new run with model.init_from",
                    fmt::join(refused, "\n  ")));
  for (const std::string& line : changed)
    if (root) log_info("resume: " + line);
}

void check_data_of(const Manifest& manifest, const Config& config, const DataFingerprint& data, bool root) {
  std::vector<std::string> changed;
  for (const auto& [what, now] : data)
    if (const auto then = manifest.data.find(what); then != manifest.data.end() && then->second != now)
      changed.push_back(fmt::format("{}: {}, was {}", what, now, then->second));
  if (!changed.empty() && config.resume.data == "check")
    throw UserError(
        fmt::format("data.root: the data are not those of the checkpoint:\n  {}\n"
                    "give it the former ones, or go on with these by resume.data=accept",
                    fmt::join(changed, "\n  ")));
  if (!root) return;
  if (manifest.data.empty())
    log_warning(
        "resume: the checkpoint is of an earlier version and does not say of which data; none are compared");
  for (const std::string& line : changed) log_warning("resume.data: accept: " + line);
}

void share(Communicator& communicator, std::vector<std::byte>& bytes) {
  std::uint64_t size = bytes.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0);
  bytes.resize(size);
  communicator.broadcast(bytes, 0);
}

void check_ranks(const Manifest& manifest, const Config& config, int ranks) {
  const std::string& rule = config.resume.residuals;
  if (rule == "keep" && manifest.ranks != ranks)
    throw UserError(
        fmt::format("the checkpoint is of {} ranks and this start has {}: each rank's residual belongs to "
                    "its own data; start {} "
                    "ranks, or say what becomes of the residuals with resume.residuals=sum or reset",
                    manifest.ranks, ranks, manifest.ranks));
  if (rule != "sum") return;
  const auto pieces = pieces_of(compress_options(config));
  if (pieces && memories().find(pieces->memory).traits.sends_differences)
    throw UserError(
        fmt::format("resume.residuals: sum does not go with compress.memory {}, which keeps estimates and no "
                    "residuals; use reset",
                    pieces->memory));
  if (config.exchange.ranks_per_host > 1)
    throw UserError("resume.residuals: sum does not go with exchange.ranks_per_host; use reset");
  if (config.data.shard.starts_with("uneven"))
    throw UserError(
        "resume.residuals: sum does not go with data.shard uneven, where each rank's residual counts by the "
        "size of its shard; use reset");
}

UserError no_checkpoint(const CheckpointStore& store) {
  return UserError(
      store.directory() +
      ": holds no complete checkpoint that every rank can read; begin a new run in another output.dir");
}

// This rank's files of ranks.
std::vector<SafetensorsFile> rank_files(const CheckpointStore& store, const Manifest& manifest,
                                        const std::string& rule, int rank) {
  std::vector<SafetensorsFile> files;
  const auto add = [&](int r) {
    const std::string name = rank_file(r);
    files.push_back(
        SafetensorsFile::parse(store.read(manifest.position.step, file_of(manifest, name)), name));
  };
  if (rule == "keep") add(rank);
  if (rule == "sum")
    for (int r = 0; r < manifest.ranks; ++r) add(r);
  return files;
}

// What is not finite stays so: every step would be skipped.
void check_finite(const CheckpointStore& store, std::int64_t step,
                  const std::vector<SafetensorsFile>& files) {
  for (const SafetensorsFile& file : files)
    for (const TensorView& tensor : file.tensors())
      if (const std::string text = non_finite_text(tensor); !text.empty())
        throw UserError(
            fmt::format("{}/{}: {}: {}; the run had diverged by then. Move this checkpoint away to go on "
                        "from one before it",
                        store.path(step), file.where(), quoted_text(tensor.name), text));
}

std::vector<SavedCheckpoint> saved_up_to(const CheckpointStore& store, std::int64_t last) {
  std::vector<SavedCheckpoint> saved;
  for (const std::int64_t step : store.steps()) {
    if (step > last) break;
    try {
      const TrainingPosition position = store.manifest(step).position;
      saved.push_back({position.step, position.evaluated, position.evaluation});
    } catch (const UserError& error) {
      log_warning(error.what());
    }
  }
  return saved;
}

}  // namespace

std::map<std::string, std::string> config_values(const Config& config) {
  std::map<std::string, std::string> values;
  for (const Key& key : config_keys()) values[key.name] = key_value(key, config);
  return values;
}

RunState ResumedRun::state(const ParameterStore& store) const {
  RunState state;
  read_model(store, model.at(0), state);
  read_optimizer(store, model.at(1), state);
  if (!summed && !ranks.empty()) read_rank(store, ranks.front(), state);
  if (!summed) return state;
  RunState one;
  for (const SafetensorsFile& file : ranks) {
    read_rank(store, file, one);
    state.residual.resize(one.residual.size());
    for (std::size_t i = 0; i < one.residual.size(); ++i)
      state.residual[i] += one.residual[i] / static_cast<float>(ranks.size());
  }
  return state;
}

void check_resumable(const CheckpointStore& store, const Config& config, const DataFingerprint& data) {
  const std::vector<std::int64_t> steps = store.steps();
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    Manifest manifest;
    try {
      manifest = store.manifest(*step);
    } catch (const UserError&) {
      continue;  // read_checkpoint() says so
    }
    check_ranks(manifest, config, config.dist.ranks);
    check_config_of(manifest, config, false);
    check_data_of(manifest, config, data, false);
    return;
  }
  throw no_checkpoint(store);
}

ResumedRun read_checkpoint(const CheckpointStore& store, Communicator& communicator, const Config& config,
                           const DataFingerprint& data) {
  const int rank = communicator.rank();
  const bool root = rank == 0;
  const std::string& rule = config.resume.residuals;
  std::vector<std::int64_t> steps;
  if (root) steps = store.steps();
  std::uint64_t left = steps.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&left, 1)), 0);
  ResumedRun run;
  run.summed = rule == "sum";
  for (; left > 0; --left) {
    std::string problem;
    std::vector<std::byte> text, model, optimizer;
    if (root) try {
        const Manifest manifest = store.manifest(steps[left - 1]);
        model = store.read(manifest.position.step, file_of(manifest, kModelFile));
        optimizer = store.read(manifest.position.step, file_of(manifest, kOptimizerFile));
        const std::string words = manifest_text(manifest);
        const auto bytes = std::as_bytes(std::span(words));
        text.assign(bytes.begin(), bytes.end());
      } catch (const UserError& error) {
        problem = error.what();
      }
    share(communicator, text);
    if (!text.empty()) {
      run.manifest =
          parse_manifest({reinterpret_cast<const char*>(text.data()), text.size()}, store.directory());
      check_ranks(run.manifest, config, communicator.size());
      check_config_of(run.manifest, config, root);
      check_data_of(run.manifest, config, data, root);
      try {
        run.ranks = rank_files(store, run.manifest, rule, rank);
      } catch (const UserError& error) {
        problem = error.what();
      }
    }
    double problems = problem.empty() ? 0 : 1;
    communicator.all_reduce({&problems, 1});
    if (problems == 0) {
      share(communicator, model);
      share(communicator, optimizer);
      run.model.push_back(SafetensorsFile::parse(std::move(model), kModelFile));
      run.model.push_back(SafetensorsFile::parse(std::move(optimizer), kOptimizerFile));
      break;
    }
    if (!problem.empty()) log_warning("resume: " + problem + "; the checkpoint is passed over");
  }
  if (left == 0) throw no_checkpoint(store);
  check_finite(store, run.manifest.position.step, run.model);
  check_finite(store, run.manifest.position.step, run.ranks);
  if (root) run.saved = saved_up_to(store, run.manifest.position.step);
  std::uint64_t count = run.saved.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&count, 1)), 0);
  run.saved.resize(count);
  communicator.broadcast(std::as_writable_bytes(std::span(run.saved)), 0);
  return run;
}

}  // namespace topknot
