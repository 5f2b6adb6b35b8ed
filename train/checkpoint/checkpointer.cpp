#include "train/checkpoint/checkpointer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "compress/memory/memory.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// NaN is worse than any number.
double loss_of(const Evaluation& evaluation) {
  return std::isnan(evaluation.loss) ? std::numeric_limits<double>::infinity() : evaluation.loss;
}

// Whether a key may change between two starts of a run: where and how long it runs, and what it reports.
bool may_change(const Key& key) {
  static const std::string others =
      " data.on_device dist.backend dist.link.rate dist.link.latency dist.ranks dist.timeout_s "
      "exchange.profile schedule.decay_steps data.max_bad_files train.epochs train.max_steps "
      "train.threads train.device train.graphs train.unproven train.step_times train.eval_every "
      "train.target_accuracy train.log_every train.check_every train.max_skips train.checkpoint_every "
      "train.checkpoint_keep train.record_gradients train.profile_steps train.distribution_every ";
  return key.scope != KeyScope::run || others.find(" " + key.name + " ") != std::string::npos;
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
    // A run in tf32 on a GPU goes on in fp32 on a CPU, as a run that begins there does.
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

// An elastic run goes on with any number of ranks.
std::string residual_rule(const Manifest& manifest, const Config& config, int ranks) {
  const std::string& rule = config.resume.residuals;
  return config.elastic.min_ranks > 0 &&
                 (manifest.ranks != ranks || manifest.global_batch != global_batch(config)) && rule == "keep"
             ? "sum"
             : rule;
}

void check_ranks(const Manifest& manifest, const Config& config, int ranks) {
  const std::string rule = residual_rule(manifest, config, ranks);
  if ((manifest.global_batch > 0) != (global_batch(config) > 0))
    throw UserError(manifest.global_batch > 0
                        ? "elastic.min_ranks: the run's samples are dealt for an elastic run; give "
                          "elastic.min_ranks again, and elastic.batch=global"
                        : "elastic.batch: the run has a batch on each rank; give elastic.batch=rank");
  // Those of an elastic run go on from what they share, with optimizers that begin anew.
  if (makes_local_steps(config) && config.elastic.min_ranks == 0 &&
      (rule != "keep" || manifest.ranks != ranks))
    throw UserError(
        fmt::format("the checkpoint is of {} ranks, each with weights and an optimizer of its own "
                    "(exchange.every): go on with {} ranks and resume.residuals=keep, or begin a new run "
                    "with model.init_from=FILE, a file of 'train export'",
                    manifest.ranks, manifest.ranks));
  if (rule == "keep" && manifest.ranks != ranks)
    throw UserError(fmt::format(
        "the checkpoint is of {} ranks and this start has {}: each rank's residual belongs to its own data; "
        "start {} ranks, or say what becomes of the residuals with resume.residuals=sum or reset",
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

// Non-finite values would stay so, and every step would be skipped. With local steps a rank's own weights and
// buffers ("inner." in `files` of ranks) may be so: the next sync replaces them by the shared weights.
void check_finite(const CheckpointStore& store, std::int64_t step, const std::vector<SafetensorsFile>& files,
                  bool of_ranks) {
  for (const SafetensorsFile& file : files)
    for (const TensorView& tensor : file.tensors())
      if (const std::string text = non_finite_text(tensor);
          !text.empty() && !(of_ranks && tensor.name.starts_with("inner.")))
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

// Of rank 0 of those that made the checkpoint; for numbers of batches alone.
Loader loader_of(const Manifest& manifest, const Config& config, const Dataset& data) {
  LoaderOptions options = loader_options(config, data, true, 0, manifest.ranks);
  options.workers = 0, options.global_batch = manifest.global_batch;
  return {data, options};
}

}  // namespace

std::vector<std::int64_t> superseded(const std::vector<SavedCheckpoint>& saved, int keep) {
  const SavedCheckpoint* best = nullptr;
  for (const SavedCheckpoint& one : saved) {
    if (!one.evaluated) continue;
    const Evaluation &now = one.evaluation, &then = best ? best->evaluation : now;
    if (now.accuracy > then.accuracy || (now.accuracy == then.accuracy && loss_of(now) <= loss_of(then)))
      best = &one;
  }
  std::vector<std::int64_t> steps;
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < saved.size(); ++i)
    if (&saved[i] != best) steps.push_back(saved[i].step);
  return steps;
}

Checkpointer::Checkpointer(CheckpointStore store, std::string metrics, Step& step, int rank, int ranks,
                           int keep, std::vector<SavedCheckpoint> saved, std::function<void()> check)
    : store_(std::move(store)),
      metrics_(std::move(metrics)),
      check_(std::move(check)),
      step_(step),
      rank_(rank),
      ranks_(ranks),
      keep_(keep),
      saved_(std::move(saved)) {
  store_.remove_partial();  // by each rank, for hosts that do not see rank 0's files; no rank writes yet
}

void Checkpointer::save(Manifest manifest) {
  finish();
  with_memory("a checkpoint's copy of the run's state", 0, [&] { complete_state_ = step_.state(state_); });
  manifest_ = std::move(manifest);
  manifest_.files.clear();
  phase_ = Phase::writing;
  start(&Checkpointer::write_files);
}

// A rank that can have no further thread does the work at once.
void Checkpointer::start(void (Checkpointer::*work)()) {
  try {
    work_ = std::async(std::launch::async, work, this);
  } catch (const std::system_error&) {
    work_ = std::async(std::launch::deferred, work, this);
    work_.wait();
  }
}

// A greater one might not fit the longest header that a reader takes.
constexpr std::size_t kMostVocabulary = 50'000'000;

void Checkpointer::write_files() {
  if (complete_state_) complete_state_();
  const std::int64_t step = manifest_.position.step;
  files_.clear();
  if (rank_ == 0) {
    manifest_.parameter_checksum = checksum_hex(state_.model.weights);
    Metadata metadata = {{"format", "pt"},
                         {"program", manifest_.program},
                         {"step", fmt::format("{}", step)},
                         {"model", manifest_.config["model.name"]},
                         {"parameter_checksum", manifest_.parameter_checksum}};
    if (const Dataset& data = step_.train_loader().dataset(); data.task() == Task::language_model)
      if (std::string words = data.vocabulary(); words.size() <= kMostVocabulary)
        metadata[kVocabulary] = std::move(words);
    files_.push_back(store_.write(step, kModelFile, model_tensors(step_.store(), state_.model), metadata));
    files_.push_back(store_.write(step, kOptimizerFile, optimizer_tensors(step_.store(), state_)));
  }
  files_.push_back(store_.write(step, rank_file(rank_), rank_tensors(step_.store(), state_)));
}

double Checkpointer::ready() const {
  const bool done = work_.valid() && work_.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
  return phase_ != Phase::idle && (done || !work_.valid()) ? 1 : 0;
}

// Whether it succeeded; a failure is logged.
bool Checkpointer::end_work() {
  if (!work_.valid()) return true;
  try {
    work_.get();
    return true;
  } catch (const std::exception& error) {
    log_warning(fmt::format("checkpoint of step {}: {}", manifest_.position.step, error.what()));
    return false;
  }
}

void Checkpointer::advance() {
  if (phase_ == Phase::writing)
    begin_publishing();
  else if (phase_ == Phase::publishing)
    end_publishing();
  else if (phase_ == Phase::published)
    phase_ = Phase::idle, start(&Checkpointer::delete_superseded);
}

void Checkpointer::begin_publishing() {
  const bool written = end_work();
  struct RankFile {
    std::uint64_t written = 0, bytes = 0, checksum = 0;
  } mine;
  if (written) mine = {1, files_.back().bytes, files_.back().checksum};
  std::vector<std::vector<std::byte>> all;
  step_.all_gather(std::as_bytes(std::span(&mine, 1)), all);
  std::vector<RankFile> of_ranks(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(&of_ranks[r], all[r].data(), sizeof(RankFile));
  const auto failures = std::ranges::count(of_ranks, std::uint64_t{0}, &RankFile::written);
  if (failures > 0) {
    if (rank_ == 0) {
      log_warning(fmt::format("the checkpoint of step {} is left out: {} of {} ranks could not write it",
                              manifest_.position.step, failures, ranks_));
      store_.remove_partial();
    }
    phase_ = Phase::idle, written_ = false;
    return;
  }
  files_.pop_back();
  for (int r = 0; r < ranks_; ++r) {
    const RankFile& file = of_ranks[static_cast<std::size_t>(r)];
    files_.push_back({rank_file(r), file.bytes, file.checksum});
  }
  manifest_.files = files_;
  const TrainingPosition& position = manifest_.position;
  std::vector<SavedCheckpoint> saved = saved_;
  std::erase_if(saved, [&](const SavedCheckpoint& s) { return s.step >= position.step; });
  saved.push_back({position.step, position.evaluated, position.evaluation});
  superseded_ = superseded(saved, keep_);
  phase_ = Phase::publishing;
  if (rank_ == 0) start(&Checkpointer::publish);
}

void Checkpointer::publish() {
  sync_file(metrics_);
  if (check_) check_();
  store_.publish(manifest_.position.step, manifest_);
}

void Checkpointer::end_publishing() {
  const TrainingPosition& position = manifest_.position;
  const auto all_succeed = [&](bool mine) {
    double failures = mine ? 0 : 1;
    step_.all_reduce({&failures, 1});
    return failures == 0;
  };
  phase_ = Phase::idle;
  written_ = all_succeed(end_work());
  if (!written_) return;
  bool renamed = true;
  if (rank_ != 0) try {
      store_.publish_rank_files(position.step);
    } catch (const UserError& error) {
      log_warning(fmt::format("checkpoint of step {}: {}", position.step, error.what()));
      renamed = false;
    }
  written_ = all_succeed(renamed);  // if not, the earlier ones stay
  if (!written_) return;
  std::erase_if(saved_, [&](const SavedCheckpoint& s) {
    return s.step >= position.step ||
           std::find(superseded_.begin(), superseded_.end(), s.step) != superseded_.end();
  });
  saved_.push_back({position.step, position.evaluated, position.evaluation});
  phase_ = Phase::published;
  if (rank_ == 0) log_debug("checkpoint: " + store_.path(position.step));
}

void Checkpointer::evaluated(const TrainingPosition& position, std::uint64_t metrics_bytes) {
  if (saved_.empty() || saved_.back().step != position.step) return;
  saved_.back() = {position.step, true, position.evaluation};
  if (rank_ != 0) return;
  try {
    sync_file(metrics_);
    store_.evaluated(position.step, position, metrics_bytes);
  } catch (const UserError& error) {
    log_warning(fmt::format("checkpoint of step {}: {}", position.step, error.what()));
  }
}

// A rank with a slower disk keeps the others in short calls, as signs of life; in a long one they give up.
bool Checkpointer::finish() {
  constexpr int kMinutes = 30;
  Patience patience(60.0 * kMinutes);
  while (phase_ != Phase::idle) {
    if (work_.valid()) work_.wait_for(std::chrono::milliseconds(300));
    double done = ready();
    step_.all_reduce({&done, 1});
    if (done == ranks_)
      advance();
    else if (patience.over())
      throw Error(fmt::format("the checkpoint of step {} was not written within {} minutes",
                              manifest_.position.step, kMinutes));
  }
  end_work();  // removes
  return written_;
}

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
  const int count = static_cast<int>(ranks.size());
  // Without a global batch all weigh the same.
  const std::vector<float> weights =
      global_batch_weights(std::max<std::int64_t>(manifest.global_batch, count), count);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    read_rank(store, ranks[r], one);
    state.residual.resize(one.residual.size());
    for (std::size_t i = 0; i < one.residual.size(); ++i)
      state.residual[i] += one.residual[i] / static_cast<float>(count) * weights[r];
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

Plan resume_plan(const Manifest& manifest, const Config& config, const Dataset& data, int ranks, Step& step,
                 TrainingPosition& position) {
  position = manifest.position;
  Plan plan = plan_steps(config, step.train_loader(), position.shift);
  const std::int64_t global = global_batch(config);
  if (manifest.ranks == ranks && manifest.global_batch == global) {
    step.enter_epoch(plan.epoch(position.step), position.dealt);
    return plan;
  }
  Loader loader = loader_of(manifest, config, data);
  const Plan before = plan_steps(config, loader, position.shift);
  const std::int64_t epoch = before.epoch(position.step), made = before.in_epoch(position.step);
  std::int64_t first = 0;
  if (made > 0 || !position.dealt.empty()) {
    const std::int64_t parts = loader.batches_per_step(),
                       entered = (loader.enter_epoch(epoch, position.dealt) + parts - 1) / parts;
    if (global > 0)  // its steps' places in the epoch are those of its samples
      position.dealt = {{1, made * manifest.global_batch}};
    else if (made > entered)
      position.dealt.push_back({manifest.ranks, (made - entered) * parts});
    first = step.enter_epoch(epoch, position.dealt);
    if (first == plan.steps_per_epoch) position.dealt.clear();  // too few are left for a step
  }
  position.shift = epoch * plan.steps_per_epoch + first - position.step;
  return plan_steps(config, step.train_loader(), position.shift);
}

void warn_of_other_rate(const Manifest& manifest, const Config& config, const Dataset& data,
                        const Plan& now) {
  Config then = config;
  for (const char* key : {"train.epochs", "train.max_steps", "schedule.decay_steps"})
    if (const auto value = manifest.config.find(key); value != manifest.config.end())
      if (const auto raw = parse_raw(value->second, false)) set_key(*find_key(key), *raw, then);
  const Plan before = plan_steps(then, loader_of(manifest, then, data), manifest.position.shift);
  const auto rate = [&](const Config& of, const Plan& plan, std::int64_t step) {
    const auto schedule = make_schedule(of.schedule, of.optimizer.lr);
    schedule->load_state(manifest.position.plateau);
    return plan.lr(of, *schedule, step);
  };
  const std::int64_t step = manifest.position.step;
  if (step == 0 || step >= now.total_steps) return;
  constexpr double kSame = 0.01;
  const double was = rate(then, before, step), is = rate(config, now, step);
  if (std::abs(is - was) <= kSame * std::max(is, was)) return;
  std::string text = fmt::format(
      "resume: the learning rate goes from {:.3g} in step {} to {:.3g} in the next: schedule.name={} has now "
      "{} steps, {} in an epoch, and had {}, {} in an epoch",
      rate(then, before, step - 1), step, is, config.schedule.name, now.total_steps, now.steps_per_epoch,
      before.total_steps, before.steps_per_epoch);
  if (config.schedule.name == "cosine") {
    const auto steps = then.schedule.get<std::int64_t>(option::decay_steps);
    text += fmt::format("; schedule.decay_steps={} keeps its end", steps > 0 ? steps : before.total_steps);
  }
  log_warning(text);
}

ResumedRun read_checkpoint(const CheckpointStore& store, Communicator& communicator, const Config& config,
                           const DataFingerprint& data) {
  const int rank = communicator.rank();
  const bool root = rank == 0;
  std::vector<std::int64_t> steps;
  if (root) steps = store.steps();
  std::uint64_t left = steps.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&left, 1)), 0);
  ResumedRun run;
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
      const std::string rule = residual_rule(run.manifest, config, communicator.size());
      run.summed = rule == "sum";
      try {
        run.ranks = rank_files(store, run.manifest, rule, rank);
      } catch (const UserError& error) {
        problem = error.what();
      }
    }
    double problems = problem.empty() ? 0 : 1;
    sum_doubles(communicator, {&problems, 1});
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
  check_finite(store, run.manifest.position.step, run.model, false);
  check_finite(store, run.manifest.position.step, run.ranks, true);
  run.saved = shared_checkpoints(store, communicator, run.manifest.position.step);
  return run;
}

std::vector<SavedCheckpoint> shared_checkpoints(const CheckpointStore& store, Communicator& communicator,
                                                std::int64_t last) {
  std::vector<SavedCheckpoint> saved;
  if (communicator.rank() == 0) saved = saved_up_to(store, last);
  share(communicator, saved);
  return saved;
}

}  // namespace topknot
