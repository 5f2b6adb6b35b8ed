#include "train/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dist/exchange/transport.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/checks.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Cost = ExchangeProfile::Group;

// Encoding, and the first round of the collective, of one group of so many elements: the fit of the all-reduce or the
// all-gather, or a sparse collective's own cost model with the profile's link (UserError if it has none). The profile
// must outlive the model.
CostModel cost_model(const ExchangeProfile& profile) {
  CostModel model;
  model.sparsify = [&profile](double elements) { return at_size(profile.groups, &Cost::encode_s, elements); };
  model.communicate = [&profile](double elements) {
    if (elements <= 0) return 0.0;
    const double bytes = at_size(profile.groups, &Cost::bytes, elements);
    const double k = entries_of(profile, elements);
    if (profile.collective != "all_gather" && !profile.sums)
      return collective_cost(profile.collective, profile.link, profile.ranks, k, bytes / k);
    return profile.fit(profile.sums).seconds(bytes);
  };
  return model;
}

struct DenseSeconds {
  DenseSeconds(const ExchangeProfile& profile, double elements) {
    const double share = profile.dense.elements > 0 ? elements / profile.dense.elements : 0;
    encode = share * profile.dense.encode_s;
    decode = share * profile.dense.decode_s;
    communicate = profile.fit(profile.dense_sums).seconds(share * profile.dense.bytes);
  }
  double encode, decode, communicate;
};

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

std::vector<std::size_t> counts_of(const std::vector<Group>& groups) {
  std::vector<std::size_t> counts;
  for (const Group& group : groups) counts.push_back(group.parameters.size());
  return counts;
}

void log_choice(const ResolvedExchange& exchange, const ParameterArena& arena) {
  const ExchangeProfile& profile = *exchange.profile;
  const ExchangeOptions& options = exchange.options;
  const auto& fit = profile.fit(profile.sums);
  log_info(
      fmt::format("exchange: {} takes {:.3g} us + {:.3g} ns per byte, a link {:.3g} us + {:.3g} ns per byte; "
                  "backward {}, encoding all at once {}",
                  !profile.sums                    ? "all_gather"
                  : codes_sums(profile.collective) ? "coded_sum"
                                                   : "all_reduce",
                  1e6 * fit.alpha, 1e9 * fit.beta, 1e6 * profile.link.alpha, 1e9 * profile.link.beta,
                  milliseconds_text(profile.backward_s), milliseconds_text(profile.groups.back().encode_s)));
  if (exchange.chosen) log_info("exchange: exchange.collective=auto takes " + options.collective);
  if (!exchange.planned) return;
  const auto makespan_text = [&](const std::vector<std::size_t>& groups) {
    return milliseconds_text(modelled_makespan(profile, groups));
  };
  const auto merged = [&](const char* merge) {
    return makespan_text(counts_of(cut_groups(arena, !profile.is_dense(), "group", merge)));
  };
  log_info(fmt::format(
      "exchange: exchange.merge={} plans {} groups of {} parameters; modelled makespan {} (none: {}, all: "
      "{})",
      options.merge, options.groups.size(), sent_layers(profile).size(),
      makespan_text({options.groups.begin(), options.groups.end()}), merged("none"), merged("all")));
}

LayerDensity parse_layer_density(const std::string& text, const std::string& path,
                                 const ParameterArena& arena) {
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

LayerDensity layer_density(const RunInputs& inputs, const ParameterArena& arena, CollectiveQueue& queue) {
  const auto& keys = inputs.config.compress;
  if (keys.layer_density.empty()) return {};
  const bool automatic = keys.layer_density == "auto";
  const std::string path = automatic ? inputs.folder.layer_density_json() : keys.layer_density;
  if (!automatic || inputs.resume) {  // a resumed run has the densities that its first start has measured
    LayerDensity densities = read_layer_density(path, arena);
    queue.run([&](Communicator& c) {
      check_same(c, "what compress.layer_density names, " + path, layer_density_json(densities));
    });
    return densities;
  }
  std::string text;
  if (const Communicator& communicator = queue.communicator(); communicator.rank() == 0) {
    const int ranks = communicator.size();
    const ExchangeProfile layers = measure_layers(inputs.config, *inputs.data.train, 0, ranks);
    std::vector<std::string> names;
    std::vector<double> times;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < layers.parameters.size(); ++i)
      if (const auto& parameter = layers.parameters[i]; arena.parameters()[i]->compressible()) {
        names.push_back(parameter.name);
        times.push_back(parameter.backward_s);
        sizes.push_back(parameter.numel);
      }
    const auto values =
        lags_densities(times, sizes, keys.alpha_s, sizeof(float) * keys.beta_s_per_byte, ranks, keys.density);
    LayerDensity densities;
    for (std::size_t i = 0; i < names.size(); ++i) densities[names[i]] = values[i];
    text = layer_density_json(densities);
    write_file(path, text);
    if (!values.empty())
      log_info(
          fmt::format("layer densities from measured times: {} to {}; compress.layer_density={} repeats them",
                      short_text(std::ranges::min(values)), short_text(std::ranges::max(values)), path));
  }
  return parse_layer_density(shared_text(queue, std::move(text)), path, arena);
}

}  // namespace

std::string shared_text(CollectiveQueue& queue, std::string text) {
  queue.run([&](Communicator& c) { share(c, text); });
  return text;
}

std::string milliseconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", 1e3 * seconds) : fmt::format("{:.0f} ms", 1e3 * seconds);
}

std::vector<std::size_t> planned_groups(const std::string& rule, const ExchangeProfile& profile) {
  const Merge merge = parse_merge(rule);
  TOPKNOT_CHECK(merge.planned(), "no rule that plans: " + rule);
  const double startup = profile.fit(profile.sums).alpha;
  return merge.rule->plan(sent_layers(profile), {cost_model(profile), startup, profile.overlaps});
}

double modelled_makespan(const ExchangeProfile& profile, std::span<const std::size_t> groups) {
  const std::vector<LayerCost> layers = sent_layers(profile);
  const CostModel model = profile.overlaps ? cost_model(profile) : without_overlap(cost_model(profile));
  std::size_t handled = 0, count = 0;  // parameters, groups
  while (count < groups.size() && handled < layers.size()) handled += groups[count++];
  TOPKNOT_CHECK(handled == layers.size(), "groups that do not fit the profile's parameters");
  const Timeline timeline = evaluate(layers, groups.first(count), model);

  // The dense part follows; it is ready when its own backward passes and all encoding before them are done.
  double backward = 0, encoding = 0;
  for (const LayerCost& layer : layers) backward += layer.backward;
  if (!timeline.groups.empty()) encoding = timeline.groups.back().encoded - backward;
  double compute = backward + encoding, network = timeline.makespan;
  const auto add = [&](std::size_t size) {
    TOPKNOT_CHECK(size <= profile.parameters.size() - handled,
                  "groups that do not fit the profile's parameters");
    double elements = 0;
    for (const std::size_t end = handled + size; handled < end; ++handled) {
      elements += static_cast<double>(profile.parameters[handled].numel);
      compute = std::max(compute, profile.parameters[handled].ready_s + encoding);
    }
    const DenseSeconds group(profile, elements);
    compute += group.encode;
    encoding += group.encode;
    network = std::max(network, compute) + group.communicate;
    if (!profile.overlaps) compute = network, encoding += group.communicate;
  };
  for (const std::size_t size : groups.subspan(count)) add(size);
  if (handled < profile.parameters.size()) add(profile.parameters.size() - handled);
  return network;
}

StepModel modelled_step(const ExchangeProfile& profile, std::span<const std::size_t> groups,
                        std::int64_t every) {
  StepModel step;
  const double alone = profile.data_s + profile.forward_s + profile.backward_s + profile.update_s;
  step.seconds = alone;
  if (profile.ranks == 1) return step;
  const CostModel model = cost_model(profile);
  std::size_t next = 0;  // parameters so far
  const std::size_t handled = sent_layers(profile).size();
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
      if (bytes > 0) later += profile.fit(profile.sums).seconds(bytes);
      return;
    }
    const DenseSeconds group(profile, elements);
    step.encode += group.encode;
    step.decode += group.decode;
    step.communicate += group.communicate;
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

double ResolvedExchange::modelled_makespan(const std::vector<Group>& groups) const {
  return profile ? topknot::modelled_makespan(*profile, counts_of(groups)) : 0;
}

ResolvedExchange settle_exchange(const RunInputs& inputs, const ParameterArena& arena,
                                 CollectiveQueue& queue) {
  constexpr double kLeastLargest = 65536;  // bytes, so that a model's small messages do not blur the fit
  const Config& config = inputs.config;
  ResolvedExchange settled{exchange_options(config)};
  ExchangeOptions& options = settled.options;
  options.layer_density = layer_density(inputs, arena, queue);
  settled.planned = needs_plan(options);
  settled.chosen = options.collective == "auto";
  const std::string& path = config.exchange.profile;
  if (!settled.planned && !settled.chosen && path.empty()) return settled;
  const Communicator& communicator = queue.communicator();
  const bool root = communicator.rank() == 0;

  std::string text;
  if (path.empty()) {
    text = exchange_profile_json(measure_exchange({config}, *inputs.data.train, arena, queue, kLeastLargest,
                                                  options.layer_density)[0]);
  } else if (root) {
    const ExchangeProfile read = read_exchange_profile(path);
    const std::string off =
        check_exchange_profile(read, config, arena, communicator.size(), communicator.network(), path);
    if (!off.empty())
      log_warning("exchange.profile: " + path + " was measured with " + off + "; its times may be off");
    text = exchange_profile_json(read);
  }
  // Rank 0's numbers and decisions hold: all ranks must have the same plan.
  ExchangeProfile& profile =
      settled.profile.emplace(parse_exchange_profile(shared_text(queue, std::move(text)), path));
  std::string decided;
  if (root) {
    if (settled.chosen) options.collective = chosen_collective(profile, options);
    decided = profile.collective = options.collective;
    if (settled.planned)
      for (const std::size_t count : planned_groups(options.merge, profile))
        decided += fmt::format(" {}", count);
  }
  std::istringstream words(shared_text(queue, std::move(decided)));
  words >> options.collective;
  profile.collective = options.collective;
  for (int count = 0; words >> count;) options.groups.push_back(count);
  // No parameter is compressed: there is nothing to plan.
  if (settled.planned && options.groups.empty()) options.merge = "all", settled.planned = false;
  if (!root) return settled;
  if (path.empty()) write_file(inputs.folder.exchange_profile_json(), exchange_profile_json(profile));
  log_choice(settled, arena);
  auto origins = inputs.origins;
  if (settled.planned) origins["exchange.groups"] = Origin::measured;
  if (settled.chosen) origins["exchange.collective"] = Origin::measured;
  if (settled.planned || settled.chosen) rewrite_config(inputs.folder, settled.effective(config), origins);
  return settled;
}

LayerDensity read_layer_density(const std::string& path, const ParameterArena& arena) {
  constexpr std::size_t kMostBytes = 16 << 20;
  const std::string hint = "; compress.layer_density takes a JSON file {\"parameter\": density}, or auto";
  return parse_layer_density(read_text_file(path, kMostBytes, hint), path, arena);
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

}  // namespace topknot
