#include "train/plan/plan.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dist/exchange/transport.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/checks.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Cost = ExchangeProfile::Group;

// All that the method handles, as one message.
double handled_elements(const ExchangeProfile& profile) {
  double elements = 0;
  for (const LayerCost& layer : sent_layers(profile)) elements += layer.elements;
  return elements;
}

// Entries that a group sends at the profile's density.
double entries(const ExchangeProfile& profile, double elements) {
  return std::max(1.0, profile.density * elements);
}

double bytes_per_entry(const ExchangeProfile& profile, double elements) {
  return at_size(profile.groups, &Cost::bytes, elements) / entries(profile, elements);
}

bool dense_method(const ExchangeProfile& profile) {
  return profile.method == "dense";
}

// With no overlap a collective takes the compute thread's time.
CostModel serial(const CostModel& model) {
  return {[model](double elements) { return model.sparsify(elements) + model.communicate(elements); },
          [](double) { return 0.0; }};
}

// The quickest one that the method's messages allow.
std::string chosen_collective(const ExchangeProfile& profile, ExchangeOptions options) {
  options.collective = quickest_collective(profile);
  if (options.collective == "all_gather" || !profile.parameters.front().compressed) return "all_gather";
  try {
    check_collective(options);
  } catch (const UserError& error) {
    log_info(std::string("exchange.collective=auto takes all_gather: ") + error.what());
    return "all_gather";
  }
  return options.collective;
}

// Parameters per group over all parameters, without a plan.
std::vector<std::size_t> counts(const ParameterArena& arena, const ExchangeProfile& profile,
                                const std::string& merge) {
  std::vector<std::size_t> result;
  for (const Group& group : cut_groups(arena, profile.method != "dense", "group", merge))
    result.push_back(group.parameters.size());
  return result;
}

void log_choice(const ExchangeProfile& profile, const ParameterArena& arena, const ExchangeOptions& options,
                const ExchangeChoice& choice) {
  const auto& fit = profile.sums ? profile.reduce : profile.gather;
  log_info(
      fmt::format("exchange: {} takes {:.3g} us + {:.3g} ns per byte, a link {:.3g} us + {:.3g} ns per byte; "
                  "backward {}, encoding all at once {}",
                  !profile.sums                    ? "all_gather"
                  : codes_sums(profile.collective) ? "coded_sum"
                                                   : "all_reduce",
                  1e6 * fit.alpha, 1e9 * fit.beta, 1e6 * profile.link.alpha, 1e9 * profile.link.beta,
                  milliseconds_text(profile.backward_s), milliseconds_text(profile.groups.back().encode_s)));
  if (choice.chosen) log_info("exchange: exchange.collective=auto takes " + options.collective);
  if (!choice.planned) return;
  log_info(
      fmt::format("exchange: exchange.merge={} plans {} groups of {} parameters; modelled makespan {} (none: "
                  "{}, all: {})",
                  options.merge, options.groups.size(), sent_layers(profile).size(),
                  milliseconds_text(modelled_makespan(
                      profile, std::vector<std::size_t>(options.groups.begin(), options.groups.end()))),
                  milliseconds_text(modelled_makespan(profile, counts(arena, profile, "none"))),
                  milliseconds_text(modelled_makespan(profile, counts(arena, profile, "all")))));
}

}  // namespace

std::string shared_text(CollectiveQueue& queue, std::string text) {
  queue.run([&](Communicator& c) { share(c, text); });
  return text;
}

std::string milliseconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", 1e3 * seconds) : fmt::format("{:.0f} ms", 1e3 * seconds);
}

double at_size(const std::vector<Cost>& groups, double Cost::*figure, double elements) {
  TOPKNOT_CHECK(!groups.empty(), "a profile without measured groups");
  if (elements <= 0) return 0;
  if (elements <= groups.front().elements) return groups.front().*figure;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    const Cost &below = groups[i - 1], &above = groups[i];
    if (elements > above.elements) continue;
    const double part = (elements - below.elements) / (above.elements - below.elements);
    return below.*figure + part * (above.*figure - below.*figure);
  }
  return groups.back().*figure * (elements / groups.back().elements);
}

std::vector<LayerCost> sent_layers(const ExchangeProfile& profile) {
  std::vector<LayerCost> layers;
  double ready = 0;
  for (const auto& parameter : profile.parameters) {
    if (!dense_method(profile) && !parameter.compressed) continue;
    layers.push_back({static_cast<double>(parameter.numel), std::max(0.0, parameter.ready_s - ready)});
    ready = std::max(ready, parameter.ready_s);
  }
  return layers;
}

CostModel cost_model(const ExchangeProfile& profile) {
  CostModel model;
  model.sparsify = [&profile](double elements) { return at_size(profile.groups, &Cost::encode_s, elements); };
  model.communicate = [&profile](double elements) {
    if (elements <= 0) return 0.0;
    const double bytes = at_size(profile.groups, &Cost::bytes, elements);
    const double k = entries(profile, elements);
    if (profile.collective != "all_gather" && !profile.sums)
      return collective_cost(profile.collective, profile.link, profile.ranks, k, bytes / k);
    return (profile.sums ? profile.reduce : profile.gather).seconds(bytes);
  };
  return model;
}

std::vector<std::size_t> planned_groups(const std::string& rule, const ExchangeProfile& profile) {
  const Merge merge = parse_merge(rule);
  TOPKNOT_CHECK(merge.planned(), "no rule that plans: " + rule);
  const double startup = (profile.sums ? profile.reduce : profile.gather).alpha;
  return merge.rule->plan(sent_layers(profile), {cost_model(profile), startup, profile.overlaps});
}

double modelled_makespan(const ExchangeProfile& profile, std::span<const std::size_t> groups) {
  const std::vector<LayerCost> layers = sent_layers(profile);
  const CostModel model = profile.overlaps ? cost_model(profile) : serial(cost_model(profile));
  std::size_t handled = 0, count = 0;  // parameters, groups
  while (count < groups.size() && handled < layers.size()) handled += groups[count++];
  TOPKNOT_CHECK(handled == layers.size(), "groups that do not fit the profile's parameters");
  const Timeline timeline = evaluate(layers, groups.first(count), model);

  // The dense part follows; it is ready when its own backward passes and all encoding before them are done.
  std::vector<std::size_t> dense(groups.begin() + static_cast<std::ptrdiff_t>(count), groups.end());
  std::size_t left = profile.parameters.size() - handled;
  for (const std::size_t size : dense) {
    TOPKNOT_CHECK(size <= left, "groups that do not fit the profile's parameters");
    left -= size;
  }
  if (left > 0) dense.push_back(left);
  double backward = 0, encoding = 0;
  for (const LayerCost& layer : layers) backward += layer.backward;
  if (!timeline.groups.empty()) encoding = timeline.groups.back().encoded - backward;
  double compute = backward + encoding, network = timeline.makespan;
  auto parameter = profile.parameters.begin() + static_cast<std::ptrdiff_t>(handled);
  for (const std::size_t size : dense) {
    double elements = 0;
    for (std::size_t i = 0; i < size; ++i, ++parameter) {
      elements += static_cast<double>(parameter->numel);
      compute = std::max(compute, parameter->ready_s + encoding);
    }
    const double share = profile.dense.elements > 0 ? elements / profile.dense.elements : 0;
    compute += share * profile.dense.encode_s;
    encoding += share * profile.dense.encode_s;
    const double sending =
        (profile.dense_sums ? profile.reduce : profile.gather).seconds(share * profile.dense.bytes);
    network = std::max(network, compute) + sending;
    if (!profile.overlaps) compute = network, encoding += sending;
  }
  return network;
}

StepModel modelled_step(const ExchangeProfile& profile, std::span<const std::size_t> groups,
                        std::int64_t every) {
  StepModel step;
  const double alone = profile.data_s + profile.forward_s + profile.backward_s + profile.update_s;
  step.seconds = alone;
  if (profile.ranks == 1) return step;
  const CostModel model = cost_model(profile);
  std::size_t next = 0, handled = 0;  // parameters so far; those of the method
  for (const auto& parameter : profile.parameters) handled += dense_method(profile) || parameter.compressed;
  double later = 0;  // further rounds, when all groups have been decoded
  const auto add = [&](std::size_t count) {
    const bool compressed = next < handled;
    double elements = 0;
    for (std::size_t end = next + count; next < end; ++next)
      elements += static_cast<double>(profile.parameters.at(next).numel);
    ++step.groups;
    if (compressed) {
      step.encode += model.sparsify(elements);
      step.communicate += model.communicate(elements);
      step.decode += at_size(profile.groups, &Cost::decode_s, elements);
      const double bytes = at_size(profile.groups, &Cost::later_bytes, elements);
      if (bytes > 0) later += (profile.sums ? profile.reduce : profile.gather).seconds(bytes);
      return;
    }
    const double share = profile.dense.elements > 0 ? elements / profile.dense.elements : 0;
    step.encode += share * profile.dense.encode_s;
    step.decode += share * profile.dense.decode_s;
    step.communicate +=
        (profile.dense_sums ? profile.reduce : profile.gather).seconds(share * profile.dense.bytes);
  };
  for (const std::size_t count : groups) add(count);
  if (next < profile.parameters.size()) add(profile.parameters.size() - next);
  const double makespan = modelled_makespan(profile, groups);
  const double agreement = profile.gather.seconds(1);  // during decoding
  step.exposed = std::max(0.0, makespan - profile.backward_s - step.encode) + later +
                 (profile.overlaps ? std::max(0.0, agreement - step.decode) : agreement);
  step.communicate += later + agreement;
  if (every > 0) {
    for (double* part : {&step.encode, &step.decode, &step.communicate}) *part /= static_cast<double>(every);
    step.exposed = step.communicate;
  }
  step.seconds = alone + step.encode + step.exposed + step.decode;
  return step;
}

double measured_makespan(std::span<const ExchangeSpan> spans,
                         std::chrono::steady_clock::time_point backward_begin) {
  auto end = backward_begin;
  for (const ExchangeSpan& span : spans)
    if (span.kind == ExchangeSpan::Kind::communicate && span.group >= 0 && span.round == 0)
      end = std::max(end, span.end);
  return std::chrono::duration<double>(end - backward_begin).count();
}

std::string quickest_collective(const ExchangeProfile& profile) {
  const double elements = handled_elements(profile);
  if (elements <= 0) return "all_gather";
  return cheapest_collective(profile.link, profile.ranks, entries(profile, elements),
                             bytes_per_entry(profile, elements));
}

ExchangeChoice choose_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue, const RunDirectory& folder, ExchangeOptions& options) {
  ExchangeChoice choice;
  choice.planned = needs_plan(options);
  choice.chosen = options.collective == "auto";
  const std::string& path = config.exchange.profile;
  if (!choice.planned && !choice.chosen && path.empty()) return choice;
  const Communicator& communicator = queue.communicator();
  const bool root = communicator.rank() == 0;

  std::string text;
  if (path.empty()) {
    text = exchange_profile_json(measure_exchange(config, data, arena, queue, options));
  } else if (root) {
    const ExchangeProfile read = read_exchange_profile(path);
    const std::string off =
        check_exchange_profile(read, config, arena, communicator.size(), communicator.network(), path);
    if (!off.empty())
      log_warning("exchange.profile: " + path + " was measured with " + off + "; its times may be off");
    text = exchange_profile_json(read);
  }
  // Rank 0's numbers and decisions hold: all ranks must have the same plan.
  ExchangeProfile profile = parse_exchange_profile(shared_text(queue, std::move(text)), path);
  std::string decided;
  if (root) {
    if (choice.chosen) options.collective = chosen_collective(profile, options);
    profile.collective = options.collective;
    decided = options.collective;
    if (choice.planned)
      for (const std::size_t count : planned_groups(options.merge, profile))
        decided += fmt::format(" {}", count);
  }
  std::istringstream words(shared_text(queue, std::move(decided)));
  words >> options.collective;
  profile.collective = options.collective;
  for (int count = 0; words >> count;) options.groups.push_back(count);
  // No parameter is compressed: there is nothing to plan.
  if (choice.planned && options.groups.empty()) options.merge = "all", choice.planned = false;
  if (root && path.empty()) write_file(folder.exchange_profile_json(), exchange_profile_json(profile));
  if (root) log_choice(profile, arena, options, choice);
  choice.profile = std::move(profile);
  return choice;
}

Config ResolvedExchange::effective(Config config) const {
  if (choice.planned) config.exchange.groups = options.groups;
  if (choice.chosen) config.exchange.collective = options.collective;
  return config;
}

double ResolvedExchange::modelled_makespan(const std::vector<Group>& groups) const {
  if (!choice.profile) return 0;
  std::vector<std::size_t> parameters;
  for (const Group& group : groups) parameters.push_back(group.parameters.size());
  return topknot::modelled_makespan(*choice.profile, parameters);
}

ResolvedExchange settle_exchange(const RunInputs& inputs, ParameterArena& arena, CollectiveQueue& queue,
                                 const Communicator& communicator) {
  const Config& config = inputs.config;
  ResolvedExchange settled{exchange_options(config), {}};
  ExchangeOptions& options = settled.options;
  Config densities = config;
  // A resumed run has the densities that its first start has measured.
  if (inputs.resume && config.compress.layer_density == "auto")
    densities.compress.layer_density = inputs.folder.layer_density_json();
  options.layer_density =
      layer_density(densities, *inputs.data.train, arena, queue, communicator, inputs.folder);
  settled.choice = choose_exchange(config, *inputs.data.train, arena, queue, inputs.folder, options);
  if (communicator.rank() != 0 || !(settled.choice.planned || settled.choice.chosen)) return settled;
  auto origins = inputs.origins;
  if (settled.choice.planned) origins["exchange.groups"] = Origin::measured;
  if (settled.choice.chosen) origins["exchange.collective"] = Origin::measured;
  rewrite_config(inputs.folder, settled.effective(config), origins);
  return settled;
}

LayerDensity read_layer_density(const std::string& path, const ParameterArena& arena) {
  constexpr std::size_t kMostBytes = 16 << 20;
  const std::string text = read_text_file(
      path, kMostBytes, "; compress.layer_density takes a JSON file {\"parameter\": density}, or auto");
  using Json = nlohmann::ordered_json;
  const auto json = Json::parse(text, nullptr, false);
  if (!json.is_object())
    throw UserError("compress.layer_density: " + path +
                    " is no JSON object; it must read {\"parameter\": density, ...}");
  std::vector<std::string> names;
  for (const Parameter* parameter : arena.parameters()) names.push_back(parameter->name());
  LayerDensity densities;
  for (const auto& [name, value] : json.items()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      const std::string meant = nearest_name(name, names);
      throw UserError("compress.layer_density: " + path + ": the model has no parameter '" + name + "'" +
                      (meant.empty() ? "" : "; did you mean '" + meant + "'?") +
                      "; 'train FILE --dry-run' lists them");
    }
    if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > 1)
      throw UserError("compress.layer_density: " + path + ": '" + name + "' is " +
                      (value.is_primitive() ? value.dump(-1, ' ', false, Json::error_handler_t::replace)
                                            : std::string("a list or an object")) +
                      "; a density is a number above 0, at most 1");
    densities[name] = value.get<double>();
  }
  return densities;
}

std::string layer_density_json(const LayerDensity& densities) {
  return nlohmann::ordered_json(densities).dump(2) + "\n";
}

std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base) {
  TOPKNOT_CHECK(times.size() == sizes.size(), "one time per layer");
  TOPKNOT_CHECK(beta > 0 && alpha >= 0 && ranks >= 1 && base > 0 && base <= 1, "out of range");
  std::vector<double> densities(times.size(), base);
  if (ranks == 1) return densities;
  for (std::size_t i = 0; i < times.size(); ++i) {
    TOPKNOT_CHECK(sizes[i] > 0 && std::isfinite(times[i]), "a layer without elements or time");
    const double left = times[i] - std::log2(static_cast<double>(ranks)) * alpha;
    if (left <= 0) continue;
    double density = left / (2.0 * (ranks - 1) * beta * static_cast<double>(sizes[i]));
    if (density > 1) density = 0.05;
    densities[i] = std::max(density, base);
  }
  return densities;
}

LayerDensity measure_layer_density(const Config& config, const Dataset& data, int ranks) {
  const auto model = build_model(config, data);
  const auto parameters = model->store.arena().parameters();
  const LayerTimes times = measure_layer_times(config, data, 0, ranks);
  std::vector<std::string> names;
  std::vector<double> backward;
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i]->compressible()) {
      names.push_back(parameters[i]->name());
      backward.push_back(times.backward[i]);
      sizes.push_back(parameters[i]->numel());
    }
  const auto& c = config.compress;
  const auto densities =
      lags_densities(backward, sizes, c.alpha_s, sizeof(float) * c.beta_s_per_byte, ranks, c.density);
  LayerDensity result;
  for (std::size_t i = 0; i < names.size(); ++i) result[names[i]] = densities[i];
  return result;
}

LayerDensity layer_density(const Config& config, const Dataset& data, const ParameterArena& arena,
                           CollectiveQueue& queue, const Communicator& communicator,
                           const RunDirectory& folder) {
  const std::string& given = config.compress.layer_density;
  if (given.empty()) return {};
  if (given != "auto") {
    LayerDensity densities = read_layer_density(given, arena);
    queue.run([&](Communicator& c) {
      check_same(c, "what compress.layer_density names, " + given, layer_density_json(densities));
    });
    return densities;
  }
  LayerDensity densities;
  std::vector<double> values;
  if (communicator.rank() == 0) {
    densities = measure_layer_density(config, data, communicator.size());
    for (const auto& [name, density] : densities) values.push_back(density);
    const std::string path = folder.layer_density_json();
    write_file(path, layer_density_json(densities));
    if (!values.empty())
      log_info("layer densities from measured times: " +
               short_text(*std::min_element(values.begin(), values.end())) + " to " +
               short_text(*std::max_element(values.begin(), values.end())) +
               "; compress.layer_density=" + path + " repeats them");
  } else {
    for (const Parameter* parameter : arena.parameters())
      if (parameter->compressible()) densities[parameter->name()] = 0;
    values.resize(densities.size());
  }
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(values)), 0); });
  std::size_t i = 0;
  for (auto& [name, density] : densities) density = values[i++];
  return densities;
}

}  // namespace topknot
