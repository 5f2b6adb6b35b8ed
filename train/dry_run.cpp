#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "compress/sparse.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "nn/core/pass_cost.h"
#include "train/checks.h"
#include "train/evaluate.h"
#include "train/plan/choose.h"
#include "train/setup.h"
#include "train/start.h"

namespace topknot {
namespace {

constexpr int kMostSamples = 4;               // of a counted pass
constexpr std::size_t kMostPhasesShown = 12;  // of a density warm-up

struct Pass {
  double forward = 0, backward = 0;  // operations
  double peak = 0;                   // bytes
};

Pass count_pass(const Config& config, const Dataset& data, BuiltModel& model, int samples,
                const GradientHook& hook) {
  LoaderOptions options = loader_options(config, data, true, 0, 1);
  options.batch_size = samples;
  options.workers = 0;
  Loader loader(data, options);
  loader.start_epoch(1);  // the first may be of short recordings
  Batch batch;
  loader.next(batch);
  model.store.arena().mark_gradients_unwritten();
  const PassCost cost;
  const std::vector<std::int32_t> frames = output_frames(*model.module, batch);
  ForwardContext context;
  context.frames = frames;
  const Variable loss = model.loss(view_of(batch, frames), context);
  Pass pass;
  pass.forward = cost.flops();
  backward(loss, hook);
  pass.backward = cost.flops() - pass.forward;
  pass.peak = static_cast<double>(cost.peak_bytes());
  return pass;
}

void print_parameters(const ParameterStore& store, const ParameterArena& arena, bool compressed) {
  std::printf("%-32s %-18s %12s %12s  %s\n", "parameter", "shape", "elements", "offset", "is sent");
  for (const auto& p : store.parameters())
    std::printf("%-32s %-18s %12zu %12s  %s\n", p->name().c_str(), p->shape().str().c_str(), p->numel(),
                p->trained() ? std::to_string(p->offset()).c_str() : "-",
                !p->trained()                     ? "frozen"
                : compressed && p->compressible() ? "compressed"
                                                  : "dense");
  std::printf("%-32s %-18s %12zu\n\n", arena.frozen().empty() ? "total" : "total, without frozen ones", "",
              arena.size());
}

// The keys that the method's name says something of, and where their values are from.
void print_settings(const LoadedConfig& loaded) {
  const std::string& named = loaded.config.named;
  const Settings& settings = settings_of(named);
  if (!settings.empty()) fmt::print("compress.name={} says:\n", named);
  for (const auto& [name, value] : settings) {
    const Origin origin = loaded.origin(name);
    fmt::print("  {:<24} {} ({}{})\n", name, key_value(*find_key(name), loaded.config),
               origin_name(origin, loaded.config),
               origin == Origin::method ? "" : fmt::format("; {} has {}", named, value));
  }
  if (!settings.empty()) fmt::print("\n");
}

void print_groups(const std::vector<Group>& groups) {
  std::printf("groups, in the order in which they are sent:\n");
  for (const Group& group : groups)
    std::printf("  %-10s %12zu elements, %zu parameters: %s .. %s\n",
                group.compressed ? "compressed" : "dense", group.numel(), group.parameters.size(),
                group.parameters.front()->name().c_str(), group.parameters.back()->name().c_str());
}

void print_bytes(const Config& config, const ParameterArena& arena, const ExchangeOptions& options) {
  const double whole = 4.0 * static_cast<double>(arena.size());
  const std::int64_t every = config.exchange.every;
  const auto line = [&](const std::string& when, double density) {
    const auto bytes = static_cast<double>(planned_bytes(arena, options, 1, density));
    fmt::print("  {:<22} {:>10}, {} the {} of dense{}\n", when, format_bytes(bytes),
               compared_bytes(bytes, whole), format_bytes(whole),
               every > 0 ? fmt::format(", {:.3g} bits per parameter and step",
                                       32 * bytes / whole / static_cast<double>(every))
                         : "");
  };
  const bool by_density = pieces_of(compress_options(config)).has_value();
  fmt::print("\nbytes that a {} sends in a {}{}:\n", options.ranks_per_host > 1 ? "host" : "rank",
             every == 0 ? "step"
             : config.exchange.fragments > 1
                 ? fmt::format("sync of {} fragments in turn, all of them once in {}",
                               config.exchange.fragments, count_text(every, "step"))
                 : fmt::format("sync, once in {}", count_text(every, "step")),
             by_density ? ", where k entries are sent" : "");
  const std::vector<DensityPhase> phases = density_phases(config);
  for (std::size_t i = 0; i < phases.size(); ++i) {
    const bool last = i + 1 == phases.size();
    if (i == kMostPhasesShown && !last) {
      fmt::print("  ...\n");
      i = phases.size() - 1;
    }
    const DensityPhase& phase = phases[i];
    line(by_density ? fmt::format("epoch {}{} at {:.4g}", phase.first, i + 1 == phases.size() ? " on" : "",
                                  phase.density)
                    : config.compress.name,
         phase.density);
  }
  if (by_density && config.compress.layer_density == "auto")
    fmt::print("  layer densities are measured when the run starts: a step may send more than this\n");
}

void print_memory(const Config& config, const Dataset& data, const ParameterArena& arena,
                  const StepCost& cost) {
  const double gradient = 4.0 * static_cast<double>(arena.size());
  double weights = gradient;
  for (const Parameter* parameter : arena.frozen()) weights += 4.0 * static_cast<double>(parameter->numel());
  const double batches = batches_bytes(config, data);
  double total = 0;
  const auto line = [&](const char* what, double bytes, const std::string& note = "") {
    total += bytes;
    fmt::print("  {:<22} {:>10.2f} MB{}\n", what, 1e-6 * bytes, note);
  };
  fmt::print("\nmemory per rank:\n");
  line("weights", weights);
  line("gradients", gradient);
  line("residuals", gradient, "  error feedback, and where the average is made");
  line("optimizer state", cost.optimizer);
  if (makes_local_steps(config)) {
    line("weights after a sync", weights);
    line("changes of weights", 2 * gradient, "  what is exchanged, error feedback, the average");
    line("outer momentum", config.outer.momentum > 0 ? gradient : 0);
    if (config.exchange.overlap_steps > 0)
      line("a sync under way", gradient + cost.method, "  to go on from a checkpoint");
  }
  line("method state", cost.method, "  velocities, thresholds and the like");
  line("activations", cost.activations,
       fmt::format("  at the peak of forward and backward of {}, in {} on a CPU",
                   count_text(config.data.batch_size, "sample"),
                   config.train.precision == "bf16" && !on_gpu(config) ? "bf16" : "fp32"));
  line("batches", batches, "  made ahead");
  line("all", total);
}

// Prints what auto would choose for the model, from times of this process, which has no other ranks.
void print_choice(const Config& config, const Dataset& data) {
  const auto group = make_thread_group(1, config.dist.timeout_s);
  settle_threads(*group[0], config);
  CollectiveQueue queue(*group[0]);
  std::vector<NamedProfile> profiles = measure_options(config, data, queue, auto_options_of(config));
  const double latency = parse_latency("dist.link.latency", config.dist.link_latency);
  for (NamedProfile& measured : profiles)
    measured.profile.link.overhead = latency;  // as make_emulated_link()
  const std::string rates =
      config.dist.link_rate.empty() ? "10mbit,100mbit,1gbit,10gbit" : config.dist.link_rate;
  fmt::print(
      "\ncompress.name=auto with {}, {} a message, by the model, from times of this process alone; a run "
      "would try what lies within a factor of {:g}:\n",
      count_text(config.dist.ranks, "rank"), config.dist.link_latency, kTried);
  std::istringstream parts(rates);
  for (std::string rate; std::getline(parts, rate, ',');) {
    rate = rate.substr(0, rate.find('@'));  // of one that changes
    const ChoiceAt at =
        choice_at(profiles, config.dist.ranks, {rate, parse_rate("dist.link.rate", rate), latency});
    fmt::print("  {:>10}: takes {}, {} a step", rate, at.choice().name,
               milliseconds_text(at.choice().step_s));
    for (const ChoiceAt::Option& option : at.options)
      if (&option != &at.choice() && (option.tried || &option == &at.options[0]))
        fmt::print("; {} {}", option.name, milliseconds_text(option.step_s));
    fmt::print("\n");
  }
}

}  // namespace

StepCost count_step_cost(const Config& config, const Dataset& data, BuiltModel& model,
                         const ExchangeOptions& options) {
  StepCost cost;
  ParameterArena& arena = model.store.arena();
  for (const auto& buffer : make_optimizer(config.optimizer, arena)->state())
    cost.optimizer += static_cast<double>(buffer.size_bytes());

  const auto group = make_thread_group(1, config.dist.timeout_s);
  CollectiveQueue queue(*group[0]);
  ExchangeOptions whole = options;
  whole.fragments = 1;
  Exchange exchange(arena, queue, whole);
  exchange.begin_step({.density = density_at_epoch(config, 0), .lr = config.optimizer.lr});
  const int batch = config.data.batch_size, most = std::min(batch, kMostSamples);
  const Pass small = count_pass(config, data, model, 1, {});
  const Pass large =
      count_pass(config, data, model, most, [&](Parameter& parameter) { exchange.ready(parameter); });
  exchange.finish(true);
  cost.method =
      static_cast<double>(exchange.state().size()) / (options.in_parts() ? options.ranks_per_host : 1);

  const double samples = batch, steps = config.train.accumulate;
  cost.forward_flops = steps * samples / most * large.forward;
  cost.backward_flops = steps * samples / most * large.backward;
  cost.activations = large.peak;
  if (most > 1) cost.activations += (samples - most) * (large.peak - small.peak) / (most - 1);
  return cost;
}

void print_dry_run(const LoadedConfig& loaded) {
  const Config& given = loaded.config;
  const Config config = before_choice(given);
  if (config.train.device != "cuda") check_device(config);  // a GPU's run can be looked at without the GPU
  const RunData data = load_data(config);
  const RunCheck check = check_run(config, data);
  throw_problems(check.problems);
  for (const std::string& line : check.warnings) log_warning(line);
  const auto model = build_model(config, *data.train);
  ParameterArena& arena = model->store.arena();
  const ExchangeOptions options = unplanned_options(config, arena);
  const Loader loader(*data.train, loader_options(config, *data.train, true, 0, config.dist.ranks));
  const Plan plan = plan_steps(config, loader);

  print_parameters(model->store, arena, compresses(config));
  print_settings(loaded);
  if (chooses_method(given))
    fmt::print("compress.name=auto chooses when the run starts; dense stands here\n");
  if (needs_plan(exchange_options(config)))
    fmt::print(
        "exchange.merge={} plans from times that are measured when the run starts; until then one group a "
        "parameter stands here\n",
        config.exchange.merge);
  if (config.exchange.collective == "auto")
    fmt::print("exchange.collective=auto is chosen when the run starts; all_gather stands here\n");
  print_groups(plan_groups(arena, options));
  print_bytes(config, arena, options);
  const StepCost cost = count_step_cost(config, *data.train, *model, options);
  print_memory(config, *data.train, arena, cost);
  fmt::print(
      "compute per rank: {:.4g} GFLOP per step, of them forward {:.4g} and backward {:.4g} (convolutions and "
      "matrix products, 2 per multiply-add)\n",
      1e-9 * (cost.forward_flops + cost.backward_flops), 1e-9 * cost.forward_flops,
      1e-9 * cost.backward_flops);
  fmt::print(
      "data: {} training and {} test samples; {} ranks x batch {} x {}; {} steps per epoch, {} in all\n",
      data.train->size(), data.test->size(), config.dist.ranks, config.data.batch_size,
      config.train.accumulate, plan.steps_per_epoch, plan.total_steps);
  const bool stream = data.train->task() == Task::language_model;
  const std::int64_t window = data.train->labels_per_sample();
  fmt::print(
      "an epoch {} {} of {} {}{}\n", loader.random_windows() ? "draws" : "uses",
      loader.epoch_samples() * window, data.train->size() + (stream ? window : 0),
      stream ? "tokens" : "samples",
      plan.last_batches == config.train.accumulate
          ? ""
          : fmt::format("; its last step has {} of {} batches", plan.last_batches, config.train.accumulate));
  if (chooses_method(given) && config.dist.ranks > 1) print_choice(given, *data.train);
}

}  // namespace topknot
