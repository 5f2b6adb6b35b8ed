// The modelled time, and the greedy merge rules of the papers: MG-WFBP and OMGS-SGD.
#include "dist/plan/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "dist/plan/merge_plan.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

double checked(double value, const char* what) {
  TOPKNOT_CHECK(std::isfinite(value) && value >= 0,
                fmt::format("{} must be finite and not negative: {}", what, value));
  return value;
}

// The state of the OMGS greedy. Index 0 is sent first here, where the authors' code counts down.
class OmgsClock {
 public:
  OmgsClock(std::span<const LayerCost> layers, const CostModel& model)
      : model_(model), layers_(layers.begin(), layers.end()), count_(layers.size()) {
    backward_begin_.resize(count_);
    sparsify_begin_.resize(count_);
    communicate_begin_.resize(count_);
    for (const LayerCost& layer : layers) {
      sparsify_.push_back(model.sparsify(layer.elements));
      communicate_.push_back(model.communicate(layer.elements));
    }
    set_clock(0, 0);
  }

  OmgsDecision decide(std::size_t i) const {
    const double here = layers_[i].elements, next = layers_[i + 1].elements, both = here + next;
    OmgsDecision decision;
    decision.layer = count_ - 1 - i;
    decision.wait = layers_[i + 1].backward + model_.sparsify(both) - model_.sparsify(here) -
                    model_.sparsify(next) - (communicate_begin_[i] - (sparsify_begin_[i] + sparsify_[i]));
    decision.save = model_.communicate(here) + model_.communicate(next) - model_.communicate(both);
    decision.merged = decision.wait < decision.save;
    return decision;
  }

  void merge(std::size_t i) {
    LayerCost& next = layers_[i + 1];
    next.backward += layers_[i].backward;
    next.elements += layers_[i].elements;
    layers_[i] = {};
    sparsify_[i] = communicate_[i] = 0;
    sparsify_[i + 1] = model_.sparsify(next.elements);
    communicate_[i + 1] = model_.communicate(next.elements);
    set_clock(i + 1, backward_begin_[i]);
  }

  double makespan() const { return communicate_begin_.back() + communicate_.back(); }

 private:
  // Backward of `first` and later restarts at `begin`.
  void set_clock(std::size_t first, double begin) {
    for (std::size_t i = first; i < count_; ++i) {
      backward_begin_[i] = i == first ? begin : sparsify_begin_[i - 1] + sparsify_[i - 1];
      sparsify_begin_[i] = backward_begin_[i] + layers_[i].backward;
    }
    double free = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      const double encoded = sparsify_begin_[i] + sparsify_[i];
      communicate_begin_[i] = i == 0 ? encoded : std::max(free, encoded);
      free = communicate_begin_[i] + communicate_[i];
    }
  }

  const CostModel& model_;
  std::vector<LayerCost> layers_;
  const std::size_t count_;
  std::vector<double> sparsify_, communicate_, backward_begin_, sparsify_begin_, communicate_begin_;
};

const bool merge_rules_registered =
    (merge_rules().add("mgwfbp", "planned from measured times by the greedy of MG-WFBP",
                       {.plan =
                            [](std::span<const LayerCost> layers, const MergeCosts& costs) {
                              return merge_mgwfbp(layers, costs.startup, costs.model.communicate);
                            }}),
     merge_rules().add("omgs", "planned from measured times by the greedy of OMGS-SGD",
                       {.plan = [](std::span<const LayerCost> layers,
                                   const MergeCosts& costs) { return merge_omgs(layers, costs.model); }}),
     true);

}  // namespace

Timeline evaluate(std::span<const LayerCost> layers, std::span<const std::size_t> groups,
                  const CostModel& model) {
  Timeline timeline;
  timeline.groups.reserve(groups.size());
  double compute = 0, network = 0;  // when each is free
  std::size_t layer = 0;
  for (const std::size_t count : groups) {
    TOPKNOT_CHECK(count > 0 && count <= layers.size() - layer, "the groups do not match the layers");
    double elements = 0;
    for (const std::size_t end = layer + count; layer < end; ++layer) {
      elements += checked(layers[layer].elements, "a layer's size");
      compute += checked(layers[layer].backward, "a layer's backward time");
    }
    GroupTime time;
    time.ready = compute;
    time.encoded = compute += checked(model.sparsify(elements), "the time of selection");
    time.begin = std::max(network, compute);
    time.end = network = time.begin + checked(model.communicate(elements), "the time of a collective");
    timeline.groups.push_back(time);
  }
  TOPKNOT_CHECK(layer == layers.size(), "the groups do not match the layers");
  timeline.makespan = network;
  return timeline;
}

std::vector<std::size_t> merge_mgwfbp(std::span<const LayerCost> layers, double alpha,
                                      const std::function<double(double elements)>& communicate) {
  const std::size_t count = layers.size();
  std::vector<std::size_t> groups;
  double backward_end = count ? layers[0].backward : 0;
  double free = 0;          // when the network has sent the groups before this one
  double elements = 0;      // of this group
  std::size_t waiting = 0;  // layers of this group
  for (std::size_t i = 0; i < count; ++i) {
    elements += layers[i].elements;
    ++waiting;
    const double begin = std::max(free, backward_end), end = begin + communicate(elements);
    if (i + 1 < count) {
      const double ready = backward_end += layers[i + 1].backward;
      if (ready < end && (begin > ready || ready - begin < alpha)) continue;
    }
    groups.push_back(waiting);
    free = end;
    elements = 0;
    waiting = 0;
  }
  return groups;
}

std::vector<std::size_t> merge_omgs(std::span<const LayerCost> layers, const CostModel& model,
                                    OmgsTrace* trace) {
  if (trace) *trace = {};
  if (layers.empty()) return {};
  const std::size_t count = layers.size();
  OmgsClock clock(layers, model);
  std::vector<std::size_t> groups;
  std::size_t waiting = 0;  // layers of the group under way
  for (std::size_t i = 0; i < count; ++i) {
    bool with_next = i == 0 && count > 1;
    if (i > 0 && i + 1 < count) {
      const OmgsDecision decision = clock.decide(i);
      if (trace) trace->decisions.push_back(decision);
      with_next = decision.merged;
      if (with_next) clock.merge(i);
    }
    ++waiting;
    if (with_next) continue;
    groups.push_back(waiting);
    waiting = 0;
  }
  if (trace) trace->makespan = clock.makespan();
  return groups;
}

}  // namespace topknot
