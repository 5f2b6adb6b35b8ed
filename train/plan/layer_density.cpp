#include "train/plan/layer_density.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"
#include "train/plan/layer_times.h"

namespace topknot {

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
