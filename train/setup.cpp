#include "train/setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "compress/codec/codec.h"
#include "compress/sparse.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/ops/kernels.h"
#include "train/checkpoint/model_file.h"
#include "train/local_steps.h"
#include "train/plan/plan.h"
#include "train/plan/profile.h"

namespace topknot {

void check_device(const Config& config) {
  const auto& train = config.train;
  const bool cpu = parse_device(train.device).kind == DeviceKind::cpu;
  if (!cpu && !config.dist.link_rate.empty())
    throw UserError("dist.link.rate: slows ranks on CPUs only; set train.device=cpu, or leave it out");
  if (cpu && train.precision == "bf16" && !cpu_has_bfloat16())
    throw UserError(
        fmt::format("train.precision: bf16 needs a CPU with products of bfloat16 (AVX-512 BF16), which this "
                    "one is not, or a GPU (train.device={}{}); leave it at fp32",
                    train.device, train.device == "auto" ? ": " + cuda_problem() : ""));
}

DatasetOptions dataset_options(const Config& config) {
  DatasetOptions options = config.data;
  options.seed = config.seed;
  return options;
}

RunData load_data(const Config& config) {
  const DatasetOptions options = dataset_options(config);
  RunData data{make_dataset(config.data.name, options, Split::train),
               make_dataset(config.data.name, options, Split::test)};
  if (data.train->has_held_out()) data.held_out = make_dataset(config.data.name, options, Split::held_out);
  return data;
}

Variable BuiltModel::forward(const Tensor& images, const ForwardContext& context) const {
  ForwardContext typed = context;
  typed.cpu_activations = activations;
  const bool cast = images.device().kind == DeviceKind::cpu && !module->reads_tokens();
  return module->forward(Variable(cast ? in_form(images, images.layout(), activations) : images), typed);
}

Variable BuiltModel::loss(const BatchView& batch, const ForwardContext& context,
                          double label_smoothing) const {
  if (!module->reads_tokens()) return batch_loss(forward(batch.images, context), batch, label_smoothing);
  ForwardContext typed = context;
  typed.cpu_activations = activations;
  return module->loss(Variable(batch.images), batch.labels, static_cast<float>(label_smoothing), typed);
}

std::unique_ptr<BuiltModel> register_model(const Config& config, const Dataset& data, Device device) {
  auto built = std::make_unique<BuiltModel>(device);
  ModelOptions options = config.model;
  options.input = data.sample_shape();
  options.outputs = data.classes() > 0 ? data.classes() : data.targets();
  options.batch = config.data.batch_size;
  options.on_gpu = on_gpu(config);
  built->module = make_model(config.model.name, built->store, options);
  if (const bool tokens = data.task() == Task::language_model; built->module->reads_tokens() != tokens)
    throw UserError(fmt::format("model.name: {} {} tokens, and data.name={} {}; choose a {}",
                                config.model.name, tokens ? "does not read" : "reads", config.data.name,
                                tokens ? "has such" : "has none",
                                tokens ? "language model such as lstm_lm" : "text"));
  if (const bool sound = data.task() == Task::transcription;
      (built->module->output_frames(options.input[2]) > 0) != sound)
    throw UserError(fmt::format("model.name: {} {} recordings, and data.name={} {}; choose {}",
                                config.model.name, sound ? "does not transcribe" : "transcribes",
                                config.data.name, sound ? "has such" : "has none",
                                sound ? "deep_speech" : "data.name=speech or another model"));
  if (config.train.precision == "bf16" && !on_gpu(config)) built->activations = DType::bf16;
  return built;
}

std::unique_ptr<BuiltModel> build_model(const Config& config, const Dataset& data, Device device,
                                        bool first_weights, bool initialise) {
  auto built = register_model(config, data, device);
  const bool dense_1d = config.compress.dense_1d;
  const auto min_numel = static_cast<std::size_t>(config.compress.min_numel);
  std::vector<std::string> names;
  for (const auto& parameter : built->store.parameters()) names.push_back(parameter->name());
  check_patterns("model.freeze", config.model.freeze, names);
  const ParameterArena& arena = built->store.build(
      [=](const Parameter& p) { return !(dense_1d && p.shape().rank() <= 1) && p.numel() >= min_numel; },
      config.seed, [&](const Parameter& p) { return matches_any(config.model.freeze, p.name()); },
      initialise);
  if (arena.size() == 0) throw UserError("model.freeze: every parameter is frozen; leave one to train");
  if (first_weights && !config.model.init_from.empty())
    load_model(built->store, SafetensorsFile::read(config.model.init_from), config.model.reinit);
  return built;
}

CompressOptions compress_options(const Config& config) {
  CompressOptions options = config.compress;
  options.seed = config.seed;
  if (makes_local_steps(config)) {
    const OptimizerOptions outer = outer_options(config.outer);
    options.momentum = outer.momentum, options.nesterov = outer.nesterov;
    return options;
  }
  if (config.optimizer.name != "sgd") return options;  // whose momentum these keys are
  options.momentum = config.optimizer.momentum;
  options.nesterov = config.optimizer.nesterov;
  return options;
}

ExchangeOptions exchange_options(const Config& config) {
  ExchangeOptions options{config.exchange, config.compress, compress_options(config),
                          config.dist.ordered_sum};
  if (!makes_local_steps(config)) options.fragments = 1;
  options.same_inside = makes_local_steps(config);
  return options;
}

ExchangeOptions exchange_options(const Config& config, const ParameterArena& arena) {
  ExchangeOptions options = exchange_options(config);
  const std::string& given = config.compress.layer_density;
  if (!given.empty() && given != "auto") options.layer_density = read_layer_density(given, arena);
  return options;
}

ExchangeOptions unplanned_options(const Config& config, const ParameterArena& arena) {
  ExchangeOptions options = exchange_options(config, arena);
  if (options.collective == "auto") options.collective = "all_gather";
  if (needs_plan(options)) {
    const auto parameters = arena.parameters();
    const auto handled = !options.compressing()
                             ? static_cast<std::ptrdiff_t>(parameters.size())
                             : std::count_if(parameters.begin(), parameters.end(),
                                             [](const Parameter* p) { return p->compressible(); });
    options.groups.assign(static_cast<std::size_t>(handled), 1);
    // Nothing is compressed, and nothing to be planned.
    if (handled == 0) options.merge = "all";
  }
  return options;
}

bool needs_plan(const ExchangeOptions& options) {
  return parse_merge(options.merge).planned() && options.groups.empty();
}

std::chrono::milliseconds stop_patience(const Config& config, std::chrono::milliseconds most) {
  if (config.dist.timeout_s <= 0) return most;
  constexpr double kHalf = 500;  // ms
  return std::min(most, std::chrono::milliseconds(std::llround(kHalf * config.dist.timeout_s)));
}

std::int64_t global_batch(const Config& config) {
  if (config.elastic.min_ranks == 0 || config.elastic.batch != "global" || makes_local_steps(config))
    return 0;
  return std::int64_t{config.data.batch_size} * config.train.accumulate * config.dist.ranks;
}

LoaderOptions loader_options(const Config& config, const Dataset& data, bool train, int rank, int ranks) {
  LoaderOptions options;
  static_cast<LoaderKeys&>(options) = config.data;
  options.rank = rank, options.ranks = ranks;
  options.shard = parse_shard_rule(config.data.shard);
  options.seed = config.seed;
  options.augment = train && resolve_augment(config.data.augment, data);
  options.random_windows = config.data.get<std::string>(option::windows()) == "random";
  options.accumulate = config.train.accumulate;
  options.global_batch = train ? global_batch(config) : 0;
  options.max_bad_files = config.data.get<int>(option::max_bad_files);
  options.train = train;
  options.stop_patience = stop_patience(config, options.stop_patience);
  return options;
}

std::vector<DensityPhase> density_phases(const Config& config) {
  if (!pieces_of(compress_options(config))) return {{}};
  std::vector<DensityPhase> phases;
  const int warm_up = static_cast<int>(config.compress.warmup.size());
  for (int epoch = 0; epoch <= warm_up; ++epoch)
    if (const double density = density_at_epoch(config, epoch);
        phases.empty() || phases.back().density != density)
      phases.push_back({epoch, density});
  return phases;
}

bool depends_on_invalid_key(const std::vector<Problem>& problems,
                            std::initializer_list<std::string> prefixes) {
  const auto section = [](const std::string& key) { return key.substr(0, key.find('.')); };
  for (const Problem& problem : problems)
    for (const std::string& prefix : prefixes)
      if ((!prefix.empty() && problem.key.starts_with(prefix)) ||
          (!problem.key.empty() && !find_key(problem.key) && section(problem.key) == section(prefix)))
        return true;
  return false;
}

void add_problem(std::vector<Problem>& problems, std::initializer_list<std::string> prefixes,
                 const std::function<void()>& check) {
  if (depends_on_invalid_key(problems, prefixes)) return;
  try {
    check();
  } catch (const UserError& error) {
    problems.push_back({*prefixes.begin(), error.what()});
  }
}

namespace {

// The warning if a rank would send clearly more bytes than the gradient's own; "" if not.
// `epochs`: the number that begin.
std::string more_than_dense(const Config& config, const ParameterArena& arena, const ExchangeOptions& options,
                            std::int64_t epochs) {
  const double dense = 4.0 * static_cast<double>(arena.size());
  const auto planned = [&](const ExchangeOptions& of, double density) {
    return static_cast<double>(planned_bytes(arena, of, 1, density));
  };
  std::string phases;
  double most = 0, density = 1;
  for (const DensityPhase& phase : density_phases(config)) {
    if (phase.first >= epochs) break;
    const double bytes = planned(options, phase.density);
    if (bytes < kMoreThanDense * dense) continue;
    phases += (phases.empty() ? "" : ", ") + short_text(phase.density);
    if (phase.first > 0) phases += fmt::format(" from epoch {}", phase.first);
    if (bytes > most) most = bytes, density = phase.density;
  }
  if (phases.empty()) return "";
  std::string advice = "; compress.name=dense sends less";
  double least = dense;
  if (const auto parts = pieces_of(options.compress))
    for (const std::string& codec : index_codecs().names()) {
      ExchangeOptions other = options;
      other.compress.codec = codec;
      if (const double bytes = planned(other, density); bytes < least)
        least = bytes, advice = fmt::format("; compress.codec={} would send {}", codec, format_bytes(bytes));
    }
  const std::string key = pieces_of(options.compress) ? "compress.density (" + phases + ")"
                                                      : "compress.name=" + config.compress.name;
  return fmt::format("{}: a {} sends {} per step, {} the {} of a dense gradient{}", key,
                     options.ranks_per_host > 1 ? "host" : "rank", format_bytes(most),
                     compared_bytes(most, dense), format_bytes(dense), advice);
}

// A recording too short for its transcript has no alignment, and an infinite loss.
void check_alignments(const Dataset& data, const Module& model) {
  if (data.task() != Task::transcription) return;
  for (std::int64_t i = 0; i < data.size(); ++i) {
    const std::int64_t frames = model.output_frames(data.frames(i)),
                       needed = ctc_frames_needed(data.transcript(i));
    if (frames < needed)
      throw UserError(
          fmt::format("data.root: recording '{}': its transcript of {} characters takes {} frames of the "
                      "model's output, and there are {}; leave it out of the manifest",
                      data.where(i), data.transcript(i).size(), needed, frames));
  }
}

// A compressor may have applied a part of the optimizer's rule to its output already.
void check_applied(const Config& config, const OptimizerType& optimizer, const std::vector<Applied>& before) {
  for (const Applied applied : before)
    if (!optimizer.takes(applied))
      throw UserError(fmt::format(
          "optimizer.name: {} takes plain gradients, and {} has put the {} into them; give "
          "optimizer.name=sgd, or another method",
          config.optimizer.name,
          applied == Applied::learning_rate ? "compress.lr_inside" : "compress.name=" + config.compress.name,
          applied == Applied::learning_rate ? "learning rate" : "momentum"));
}

}  // namespace

RunCheck check_run(const Config& given, const RunData& data, bool first_weights, std::vector<Problem> known) {
  const Config config = before_choice(given);
  RunCheck check;
  const std::size_t before = known.size();
  std::unique_ptr<BuiltModel> model;
  const auto attempt = [&](std::initializer_list<std::string> prefixes, const std::function<void()>& work) {
    add_problem(known, prefixes, work);
  };
  std::int64_t epochs = 1;
  attempt({"train.accumulate", "data.", "train.epochs", "train.max_steps", "dist.ranks"}, [&] {
    const int ranks = config.dist.ranks;
    // No shard is smaller than the last rank's.
    LoaderOptions options = loader_options(config, *data.train, true, ranks - 1, ranks);
    options.workers = 0;
    const Loader loader(*data.train, options);
    const Plan plan = plan_steps(config, loader);
    check_warmup_steps(config.schedule, plan.steps_per_epoch);
    // Fewer leave the last steps' noise in the weights, and an outer momentum that has not begun.
    constexpr std::int64_t kFewSyncs = 20;
    if (const std::int64_t every = config.exchange.every; every > 0 && plan.total_steps < kFewSyncs * every)
      check.warnings.push_back(
          fmt::format("exchange.every: {} steps have {} of {}, which is few for local steps to pay; lower "
                      "it, or train longer",
                      plan.total_steps, count_text((plan.total_steps + every - 1) / every, "sync"), every));
    epochs = (plan.total_steps + plan.steps_per_epoch - 1) / plan.steps_per_epoch;
    if (options.batch_size > loader.shard_size())
      check.warnings.push_back(
          fmt::format("data.batch_size: {} is more than the {} of a rank's shard ({} over {}): samples "
                      "repeat within a batch; lower it or dist.ranks",
                      options.batch_size, count_text(loader.shard_size(), "sample"),
                      count_text(data.train->size(), "sample"), count_text(ranks, "rank")));
  });
  attempt({"model.", "data.", "seed", "compress.dense_1d", "compress.min_numel"},
          [&] { model = build_model(config, *data.train, {}, first_weights, false); });
  if (model) {
    attempt({"data."}, [&] {
      check_alignments(*data.train, *model->module);
      check_alignments(*data.test, *model->module);
    });
    ParameterArena& arena = model->store.arena();
    std::vector<Applied> applied;
    attempt({"exchange.profile", "compress.name", "compress.density", "dist."}, [&] {
      if (const std::string& path = config.exchange.profile; !path.empty())
        check_exchange_profile(read_exchange_profile(path), config, arena, config.dist.ranks,
                               config.dist.backend, path);
    });
    attempt({"compress.name", "compress.select", "compress.memory", "compress.codec", "compress.values",
             "compress.scope", "compress.layer_density", "exchange.", "optimizer.momentum"},
            [&] {
              const auto group = make_thread_group(1, config.dist.timeout_s);
              CollectiveQueue queue(*group[0]);
              const ExchangeOptions options = unplanned_options(config, arena);
              const Exchange exchange(arena, queue, options);
              for (const Group& group : exchange.groups()) applied.push_back(exchange.applied(group));
              if (const std::string line = more_than_dense(config, arena, options, epochs); !line.empty())
                check.warnings.push_back(line);
            });
    attempt({"optimizer."}, [&] {
      const OptimizerType& type = optimizers().find(config.optimizer.name);
      check_optimizer(config.optimizer);
      if (!makes_local_steps(config)) check_applied(config, type, applied);
    });
  }
  attempt({"schedule.", "optimizer.lr"}, [&] { make_schedule(config.schedule, config.optimizer.lr); });
  check.problems.assign(known.begin() + static_cast<std::ptrdiff_t>(before), known.end());
  return check;
}

Plan plan_steps(const Config& config, const Loader& loader, std::int64_t shift) {
  Plan plan{.shift = shift};
  plan.batches = loader.batches_per_step(), plan.step_samples = loader.step_samples();
  const std::int64_t batches = loader.steps_per_epoch();
  if (plan.batches > batches)
    throw UserError(fmt::format(
        "train.accumulate: {} micro-batches, but an epoch has {}; lower it, data.batch_size or dist.ranks",
        plan.batches, batches));
  plan.steps_per_epoch = (batches + plan.batches - 1) / plan.batches;
  plan.last_batches = batches - (plan.steps_per_epoch - 1) * plan.batches;
  plan.total_steps = plan.steps_per_epoch * config.train.epochs - shift;
  if (config.train.epochs == 0) plan.total_steps = config.train.max_steps;
  if (config.train.max_steps > 0) plan.total_steps = std::min(plan.total_steps, config.train.max_steps);
  return plan;
}

std::int64_t evaluation_batches(const Config& config, const Dataset& data, int ranks) {
  LoaderOptions options = loader_options(config, data, false, 0, ranks);
  options.workers = 0;
  const Loader first(data, options);
  const std::int64_t batch = std::int64_t{config.data.batch_size} * ranks;
  return data.task() == Task::language_model ? first.steps_per_epoch() : (data.size() + batch - 1) / batch;
}

std::int64_t evaluations_left(const Plan& plan, double every, std::int64_t step) {
  const std::int64_t steps = std::max<std::int64_t>(0, plan.total_steps - step);
  const double interval = every * static_cast<double>(plan.steps_per_epoch);
  const std::int64_t shift = plan.shift;
  if (steps == 0 || interval <= 1) return interval > 0 ? steps : std::min<std::int64_t>(1, steps);
  const auto due = [&](std::int64_t done) {
    return std::floor(static_cast<double>(done + shift) / interval);
  };
  const bool end_is_due =
      due(plan.total_steps) > due(plan.total_steps - 1);  // the last step has one in any case
  return static_cast<std::int64_t>(due(plan.total_steps) - due(step)) + (end_is_due ? 0 : 1);
}

}  // namespace topknot
