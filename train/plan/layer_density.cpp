#include "train/plan/layer_density.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

constexpr int kWarmUpPasses = 2, kTimedPasses = 7;  // passes
constexpr double kRate = 1e-12;  // of the updates: the weights stay what they are, and finite

}  // namespace

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

LayerTimes measure_layer_times(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass) {
  const auto model = build_model(config, data);
  ParameterArena& arena = model->store.arena();
  const auto optimizer = make_optimizer(config.optimizer, arena);
  LoaderOptions options = loader_options(config, data, true, rank, ranks);
  options.workers = 0;
  Loader loader(data, options);
  loader.start_epoch(0);

  std::map<const Parameter*, std::vector<double>> times;
  std::vector<const Parameter*> order;  // of the last pass; the same in all
  std::vector<double> data_s, forward_s, update_s;
  for (int pass = 0; pass < kWarmUpPasses + kTimedPasses; ++pass) {
    if (before_pass) before_pass();
    double data_time = 0, forward_time = 0, update_time = 0;
    Batch batch;
    {
      Stopwatch watch(data_time);
      if (!loader.next(batch)) {
        loader.start_epoch(0);
        TOPKNOT_CHECK(loader.next(batch), "an epoch without batches");
      }
    }
    arena.mark_gradients_unwritten();
    const std::vector<std::int32_t> frames = output_frames(*model->module, batch);
    Variable loss;
    {
      Stopwatch watch(forward_time);
      ForwardContext context;
      context.frames = frames;
      context.seed = config.seed;
      context.step = static_cast<std::uint32_t>(pass);
      loss = model->loss(view_of(batch, frames), context);
    }
    order.clear();
    Clock::time_point last = Clock::now();
    backward(loss, [&](Parameter& parameter) {
      const auto now = Clock::now();
      if (pass >= kWarmUpPasses)
        times[&parameter].push_back(std::chrono::duration<double>(now - last).count());
      order.push_back(&parameter);
      last = now;
    });
    arena.zero_unwritten_gradients();
    {
      Stopwatch watch(update_time);
      optimizer->update(0, arena.gradient(0, arena.size()), {pass, kRate});
    }
    if (pass < kWarmUpPasses) continue;
    data_s.push_back(data_time);
    forward_s.push_back(forward_time);
    update_s.push_back(update_time);
  }

  std::map<const Parameter*, double> ready;
  double sum = 0;
  for (const Parameter* parameter : order) ready[parameter] = sum += quantile(times[parameter], 0.5);
  LayerTimes result;
  for (const Parameter* parameter : arena.parameters()) {
    result.backward.push_back(quantile(times[parameter], 0.5));
    result.ready.push_back(ready[parameter]);
  }
  result.data_s = quantile(data_s, 0.5);
  result.forward_s = quantile(forward_s, 0.5);
  result.update_s = quantile(update_s, 0.5);
  return result;
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
