#include "train/plan/exchange_plan.h"

#include <algorithm>

#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

using Cost = ExchangeProfile::Group;

// All that the method handles, as one message.
double handled_elements(const ExchangeProfile& profile) {
  double elements = 0;
  for (const LayerCost& layer : travelling_layers(profile)) elements += layer.elements;
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

}  // namespace

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

std::vector<LayerCost> travelling_layers(const ExchangeProfile& profile) {
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
    if (profile.collective != "all_gather")
      return collective_cost(profile.collective, profile.link, profile.ranks, k, bytes / k);
    return (profile.sums ? profile.reduce : profile.gather).seconds(bytes);
  };
  return model;
}

std::vector<std::size_t> planned_groups(const std::string& rule, const ExchangeProfile& profile) {
  const Merge merge = parse_merge(rule);
  TOPKNOT_CHECK(merge.planned(), "no rule that plans: " + rule);
  const double startup = (profile.sums ? profile.reduce : profile.gather).alpha;
  return merge.rule->plan(travelling_layers(profile), {cost_model(profile), startup, profile.overlaps});
}

double modelled_makespan(const ExchangeProfile& profile, std::span<const std::size_t> groups) {
  const std::vector<LayerCost> layers = travelling_layers(profile);
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

}  // namespace topknot
