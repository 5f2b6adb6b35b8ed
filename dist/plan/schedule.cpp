#include "dist/plan/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

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

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double rounding = 1e-15;  // of the makespan; pairs nearer than this count as equal

// The costs of all groups and bounds for the layers after a cut.
class Costs {
 public:
  Costs(std::span<const LayerCost> layers, const CostModel& model) : count_(layers.size()) {
    encode_.reserve(count_ * (count_ + 1) / 2);
    communicate_.reserve(encode_.capacity());
    for (std::size_t begin = 0; begin < count_; ++begin) {
      row_.push_back(encode_.size());
      double elements = 0, backward = 0;
      for (std::size_t end = begin; end < count_; ++end) {
        elements += layers[end].elements;
        backward += layers[end].backward;
        encode_.push_back(backward + model.sparsify(elements));
        communicate_.push_back(model.communicate(elements));
        TOPKNOT_CHECK(std::isfinite(encode_.back()) && std::isfinite(communicate_.back()) &&
                          encode_.back() >= 0 && communicate_.back() >= 0,
                      "the cost of a group must be finite and not negative");
      }
    }
    bound_rest();
  }

  std::size_t count() const { return count_; }
  // Seconds of backward and selection, and of the collective, of the group of layers [begin, end).
  double encode(std::size_t begin, std::size_t end) const { return encode_[row_[begin] + end - begin - 1]; }
  double communicate(std::size_t begin, std::size_t end) const {
    return communicate_[row_[begin] + end - begin - 1];
  }
  // No plan ends earlier than this.
  double least_end() const { return *std::max_element(rest_[0].begin(), rest_[0].end()); }
  // False: no plan goes on from (compute, network) at `cut` to an end before `bound`.
  bool can_end_before(double bound, std::size_t cut, double compute, double network) const {
    for (std::size_t g = 0; g < weights; ++g)
      if (compute + weight(g) * (network - compute) + rest_[cut][g] >= bound) return false;
    return true;
  }
  // Whatever group follows the cut, its collective cannot begin earlier than this after compute is free.
  double least_encode(std::size_t cut) const { return least_encode_[cut]; }

 private:
  static constexpr std::size_t weights = 17;
  static constexpr double weight(std::size_t g) { return static_cast<double>(g) / (weights - 1); }

  // A plan for the layers after a cut ends at max(network + C, compute + W): C the sum of its collectives, W
  // the longest way from the first layer through some group's encoding and the collectives from there on. For
  // a weight w in [0, 1] that is at least w (network + C) + (1 - w) (compute + W); rest_[cut][w] bounds
  // w C + (1 - w) W from below over all plans. With a group of times e and c in front of (C, W),
  // C' = c + C and W' = e + max(c + C, W), where the maximum again is at least any weighted mean: so
  // w C' + (1 - w) W' >= (1 - w) e + v c + v C + (1 - v) W for every v in [w, 1].
  void bound_rest() {
    rest_.assign(count_ + 1, {});
    least_encode_.assign(count_ + 1, 0);
    for (std::size_t begin = count_; begin-- > 0;) {
      std::array<double, weights>& rest = rest_[begin];
      rest.fill(infinity);
      double least = infinity;
      for (std::size_t end = begin + 1; end <= count_; ++end) {
        const double e = encode(begin, end), c = communicate(begin, end);
        least = std::min(least, e);
        double best = 0;
        for (std::size_t g = weights; g-- > 0;) {
          best = std::max(best, weight(g) * c + rest_[end][g]);
          rest[g] = std::min(rest[g], (1 - weight(g)) * e + best);
        }
      }
      least_encode_[begin] = least;
    }
  }

  const std::size_t count_;
  std::vector<std::size_t> row_;
  std::vector<double> encode_, communicate_, least_encode_;
  std::vector<std::array<double, weights>> rest_;
};

// A way to have sent all layers before a cut.
struct State {
  double compute, network;   // when each is free
  std::uint32_t cut, state;  // where the last group began, and the state there
};

// The states of one cut that no other beats: `compute` rises, `network` falls. With a limit, states that are
// nearly as good as another one are dropped when there are too many.
class Front {
 public:
  explicit Front(double tolerance) : tolerance_(tolerance) {}

  bool beats(double compute, double network) const {
    const auto after = first_above(compute);
    return after != states_.begin() && std::prev(after)->network <= network + tolerance_;
  }

  // A state that the front does not beat.
  void add(const State& s) {
    // Only what is beaten outright goes: dropping by the tolerance here would add up along a chain.
    auto first = first_above(s.compute);
    while (first != states_.begin() && std::prev(first)->compute >= s.compute) --first;
    auto last = first;
    while (last != states_.end() && last->network >= s.network) ++last;
    states_.insert(states_.erase(first, last), s);
    if (states_.size() >= 2 * limit_) thin();
  }

  // Every state that goes has one that is at most the returned number of seconds worse in either time, so
  // the best end from here is at most that much later.
  double finish() {
    if (states_.size() > limit_) thin();
    return excess_;
  }

  const std::vector<State>& states() const { return states_; }

 private:
  // Enough for all but contrived costs, few enough that those take seconds, not hours.
  static constexpr std::size_t limit_ = 512;

  std::vector<State>::const_iterator first_above(double compute) const {
    return std::upper_bound(states_.begin(), states_.end(), compute + tolerance_,
                            [](double t, const State& other) { return t < other.compute; });
  }

  void thin() {
    const double step = (states_.front().network - states_.back().network) / static_cast<double>(limit_ - 1);
    std::size_t kept = 1;
    for (std::size_t i = 1; i < states_.size(); ++i)
      if (states_[i].network < states_[kept - 1].network - step) states_[kept++] = states_[i];
    states_.resize(kept);
    excess_ += step;
  }

  double tolerance_;
  double excess_ = 0;
  std::vector<State> states_;
};

struct Found {
  std::vector<std::size_t> groups;  // empty: nothing ends before the given time
  double excess = 0;
  std::size_t front = 0;
};

// The plan that ends first, if it ends before `bound`.
Found search(const Costs& costs, double bound) {
  const std::size_t count = costs.count();
  const double tolerance = rounding * bound;
  std::vector<Front> fronts(count + 1, Front(tolerance));
  fronts[0].add({0, 0, 0, 0});
  Found found;
  for (std::size_t end = 1; end <= count; ++end) {
    Front& front = fronts[end];
    for (std::size_t begin = end; begin-- > 0;) {
      const double encode = costs.encode(begin, end), communicate = costs.communicate(begin, end);
      const std::vector<State>& from = fronts[begin].states();
      if (from.empty()) continue;
      // Better than any of the states, to spare most groups the loop.
      const double soonest = from.front().compute + encode;
      if (!costs.can_end_before(bound, end, soonest, std::max(soonest, from.back().network) + communicate))
        continue;
      for (std::size_t i = 0; i < from.size(); ++i) {
        const double compute = from[i].compute + encode;
        const bool idle = from[i].network <= compute;
        double network = std::max(from[i].network, compute) + communicate;
        // The network waits for the next group's encoding in any case, so an earlier end makes no difference.
        if (end < count) network = std::max(network, compute + costs.least_encode(end));
        if (!front.beats(compute, network) && costs.can_end_before(bound, end, compute, network))
          front.add({compute, network, static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(i)});
        if (idle) break;  // the states after it compute for longer and find the network idle as well
      }
    }
    found.excess += front.finish();
    found.front = std::max(found.front, front.states().size());
  }
  const std::vector<State>& last = fronts[count].states();
  if (last.empty()) return found;
  std::size_t cut = count, state = last.size() - 1;  // the least `network`
  while (cut > 0) {
    const State& s = fronts[cut].states()[state];
    found.groups.push_back(cut - s.cut);
    cut = s.cut;
    state = s.state;
  }
  std::reverse(found.groups.begin(), found.groups.end());
  return found;
}

using Layers = std::span<const LayerCost>;
const bool planning_rules_registered[] = {
    merge_rules().add("mgwfbp", "planned from measured times by the greedy of MG-WFBP",
                      {.plan =
                           [](Layers layers, const MergeCosts& costs) {
                             return merge_mgwfbp(layers, costs.startup, costs.model.communicate);
                           }}),
    merge_rules().add(
        "omgs", "planned from measured times by the greedy of OMGS-SGD",
        {.plan = [](Layers layers, const MergeCosts& costs) { return merge_omgs(layers, costs.model); }}),
    merge_rules().add("optimal", "planned from measured times: the plan of least modelled time",
                      {.plan = [](Layers layers, const MergeCosts& costs) {
                        return merge_optimal(layers,
                                             costs.overlaps ? costs.model : without_overlap(costs.model));
                      }})};

}  // namespace

CostModel without_overlap(const CostModel& model) {
  return {[model](double elements) { return model.sparsify(elements) + model.communicate(elements); },
          [](double) { return 0.0; }};
}

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

std::vector<std::size_t> merge_optimal(std::span<const LayerCost> layers, const CostModel& model,
                                       OptimalReport* report) {
  if (report) *report = {};
  const std::size_t count = layers.size();
  if (count == 0) return {};
  std::vector<std::size_t> best(count, 1);
  double bound = evaluate(layers, best, model).makespan;
  const auto offer = [&](std::vector<std::size_t> groups) {
    if (groups.empty()) return;
    const double makespan = evaluate(layers, groups, model).makespan;
    if (makespan >= bound) return;
    bound = makespan;
    best = std::move(groups);
  };
  offer({count});
  if (bound == 0) return best;
  const Costs costs(layers, model);
  // The bound for the whole is mostly within a percent of the best plan, so that plans which end soon after
  // it are searched first: few states pass, and the first plan that is found is the best one.
  const double least = costs.least_end();
  for (double gap = 5e-5;; gap *= 1.5) {
    const double limit = std::min(bound, least + gap * std::max(least, 1e-3 * bound));
    Found found = search(costs, limit);
    if (found.groups.empty() && limit < bound) continue;
    offer(std::move(found.groups));
    if (report) *report = {std::min(found.excess, std::max(0.0, bound - least)), found.front};
    break;
  }
  return best;
}

}  // namespace topknot
