#include "dist/plan/schedule.h"

#include "tests/support/test.h"

using namespace topknot;

namespace {

using Sizes = std::vector<std::size_t>;

// 14 layers, and the cost models of the OMGS authors for 1 Gbit/s Ethernet; golden values computed from them:
// float64. The tables count layers from the input; are sent starts at the output.
std::vector<LayerCost> merge_layers() {
  const double sizes[] = {1728,    36864,   73728,   147456,  294912,  589824,  589824,
                          1179648, 2359296, 2359296, 2359296, 2359296, 2359296, 5120};
  const double backward[] = {.004,  .006, .003, .004,  .002,  .003,  .003,
                             .0015, .002, .002, .0006, .0006, .0006, .0002};
  std::vector<LayerCost> layers;
  for (int l = 13; l >= 0; --l) layers.push_back({sizes[l], backward[l]});
  return layers;
}

// Top-k at density 0.001, gathered by `ranks` ranks.
CostModel merge_model(int ranks) {
  const std::map<int, std::pair<double, double>> ethernet = {
      {2, {1.6e-3, 1.0e-8}}, {4, {2.7e-3, 1.3e-8}}, {8, {4.0e-3, 1.5e-8}}, {16, {1.1e-2, 1.7e-8}}};
  const auto [alpha, beta] = ethernet.at(ranks);
  CostModel model;
  model.sparsify = [](double x) { return x > 0 ? 2.18896957e-10 * x * std::log2(x) : 0; };
  model.communicate = [alpha = alpha, beta = beta, ranks](double x) {
    return x > 0 ? 2 * (alpha + beta * 4 * ranks * 0.001 * x) : 0;
  };
  return model;
}

Sizes no_merge(std::size_t layers) {
  return Sizes(layers, 1);
}

// alpha + elements * beta, nothing for nothing.
CostModel line_model(double sparsify, double alpha, double beta) {
  return {[=](double n) { return sparsify * n; }, [=](double n) { return n > 0 ? alpha + beta * n : 0; }};
}

struct Instance {
  std::vector<LayerCost> layers;
  CostModel model;
};

// The least makespan over all groupings of the layers from `begin` on, by trying them all.
double least_by_trying(const Instance& instance, std::size_t begin = 0, double t = 0, double c = 0) {
  if (begin == instance.layers.size()) return c;
  double least = std::numeric_limits<double>::infinity(), elements = 0, backward = 0;
  for (std::size_t end = begin + 1; end <= instance.layers.size(); ++end) {
    elements += instance.layers[end - 1].elements;
    backward += instance.layers[end - 1].backward;
    const double encoded = t + backward + instance.model.sparsify(elements);
    const double sent = std::max(c, encoded) + instance.model.communicate(elements);
    least = std::min(least, least_by_trying(instance, end, encoded, sent));
  }
  return least;
}

// The same for more layers: every pair (compute free, network free) that no other beats, without bounds.
double least_by_pairs(const Instance& instance) {
  const std::size_t count = instance.layers.size();
  std::vector<std::map<double, double>> pairs(count + 1);  // network by compute; falls as compute rises
  pairs[0][0] = 0;
  for (std::size_t end = 1; end <= count; ++end) {
    std::map<double, double>& here = pairs[end];
    double elements = 0, backward = 0;
    for (std::size_t begin = end; begin-- > 0;) {
      elements += instance.layers[begin].elements;
      backward += instance.layers[begin].backward;
      const double encode = backward + instance.model.sparsify(elements);
      const double send = instance.model.communicate(elements);
      for (const auto& [t, c] : pairs[begin]) {
        const double compute = t + encode, network = std::max(c, compute) + send;
        auto at = here.upper_bound(compute);
        if (at != here.begin() && std::prev(at)->second <= network) continue;
        at = here.lower_bound(compute);
        while (at != here.end() && at->second >= network) at = here.erase(at);
        here[compute] = network;
      }
    }
  }
  return pairs[count].rbegin()->second;
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : bits_(seed) {}
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  double scale(double low, double high) { return low * std::pow(high / low, uniform()); }
  int below(int n) { return static_cast<int>(uniform() * n); }

  // Sizes and times over several decades, some zero; selection that costs nothing, n, or n log n; start-ups
  // from nothing to far longer than backward.
  Instance instance(int layers) {
    Instance result;
    for (int i = 0; i < layers; ++i)
      result.layers.push_back(
          {below(8) == 0 ? 0 : std::floor(scale(1, 1e7)), below(8) == 0 ? 0 : scale(1e-5, 1e-2)});
    const int kind = below(3);
    const double selection = scale(1e-11, 1e-8);
    result.model.sparsify = [=](double n) {
      return kind == 0 || n < 2 ? 0 : selection * n * (kind == 1 ? 1 : std::log2(n));
    };
    const double alpha = below(6) == 0 ? 0 : scale(1e-6, 3e-2), beta = scale(1e-12, 1e-8);
    result.model.communicate = [=](double n) { return n > 0 ? alpha + beta * n : 0; };
    return result;
  }

 private:
  std::mt19937_64 bits_;
};

double makespan(const Instance& instance, const Sizes& plan) {
  return evaluate(instance.layers, plan, instance.model).makespan;
}

}  // namespace

TEST_CASE("OMGS takes the authors' decisions on 2 ranks") {
  struct Golden {
    std::size_t layer;
    double wait;
    bool merged;
  };
  const Golden golden[] = {{12, .001633, true}, {11, .002023, true}, {10, .003676, false},
                           {9, .003033, true},  {8, .002432, true},  {7, .003624, false},
                           {6, .003258, false}, {5, .002178, true},  {4, .004134, false},
                           {3, .003044, true},  {2, .006033, false}, {1, .004002, false}};
  OmgsTrace trace;
  const Sizes groups = merge_omgs(merge_layers(), merge_model(2), &trace);
  CHECK(groups == Sizes{4, 3, 1, 2, 2, 1, 1});
  CHECK(trace.makespan == Approx(0.107295).margin(5e-7));
  REQUIRE(trace.decisions.size() == std::size(golden));
  for (std::size_t i = 0; i < std::size(golden); ++i) {
    CHECK(trace.decisions[i].layer == golden[i].layer);
    CHECK(trace.decisions[i].wait == Approx(golden[i].wait).margin(5.1e-7));
    CHECK(trace.decisions[i].save == Approx(.0032));
    CHECK(trace.decisions[i].merged == golden[i].merged);
  }
}

TEST_CASE("OMGS merges as the authors' code does for 4 and 16 ranks and for equal layers") {
  OmgsTrace trace;
  CHECK(merge_omgs(merge_layers(), merge_model(4), &trace) == Sizes{12, 2});
  CHECK(trace.makespan == Approx(0.115891).margin(5e-7));
  CHECK(merge_omgs(merge_layers(), merge_model(16), &trace) == Sizes{14});
  CHECK(trace.makespan == Approx(0.163195).margin(5e-7));

  const std::vector<LayerCost> equal(6, {2e6, .05});
  CHECK(merge_omgs(equal, merge_model(2), &trace) == Sizes{2, 1, 1, 1, 1});
  CHECK(trace.makespan == Approx(0.358502).margin(5e-7));
  CHECK(merge_omgs(equal, merge_model(16), &trace) == Sizes{2, 1, 1, 1, 1});
  CHECK(trace.makespan == Approx(0.381334).margin(5e-7));
}

TEST_CASE("OMGS and MG-WFBP do not wait where waiting saves just what it costs") {
  const CostModel model = line_model(0, 0.5, 0.25);
  const std::vector<LayerCost> three = {{1, 1}, {1, 10}, {1, 0.5}};
  OmgsTrace trace;
  CHECK(merge_omgs(three, model, &trace) == Sizes{2, 1});
  REQUIRE(trace.decisions.size() == 1);
  CHECK((trace.decisions[0].wait == 0.5 && trace.decisions[0].save == 0.5));
  const std::vector<LayerCost> two = {{4, 1}, {4, 0.5}};
  CHECK(merge_mgwfbp(two, 0.5, model.communicate) == Sizes{1, 1});
}

TEST_CASE("MG-WFBP merges while the network is busy, and waits for a layer that is ready within alpha") {
  const CostModel model = line_model(0, 1, 1);
  const auto plan = [&](const std::vector<LayerCost>& layers) {
    return merge_mgwfbp(layers, 1, model.communicate);
  };
  // Ready at 1, 3, 5, 7; alpha is 1. The first message begins at 1, when the second layer is neither ready
  // nor due within alpha: on its own, until 11. The others are all ready by then: one group.
  CHECK(plan({{9, 1}, {1, 2}, {1, 2}, {1, 2}}) == Sizes{1, 3});
  CHECK(plan({{9, 1}, {9, 0.5}}) == Sizes{2});
  CHECK(plan({{9, 1}, {9, 1.5}}) == Sizes{1, 1});
  // Within alpha, but this message would have ended before.
  const std::vector<LayerCost> layers = {{9, 1}, {9, .5}};
  CHECK(merge_mgwfbp(layers, 1, [](double) { return 0.25; }) == Sizes{1, 1});
}

TEST_CASE("plans for no, one and two layers, and for those without backward time or elements") {
  const CostModel model = merge_model(4);
  const std::vector<LayerCost> two = {{1000, .001}, {1000, .001}};
  const std::span<const LayerCost> one(two.data(), 1);
  OmgsTrace trace;
  CHECK(merge_omgs({}, model, &trace).empty());
  CHECK(trace.makespan == 0);
  CHECK(merge_mgwfbp({}, .001, model.communicate).empty());
  CHECK(merge_optimal({}, model).empty());
  CHECK(merge_omgs(one, model, &trace) == Sizes{1});
  CHECK(trace.decisions.empty());
  CHECK(trace.makespan == Approx(evaluate(one, Sizes{1}, model).makespan));
  CHECK(merge_mgwfbp(one, .001, model.communicate) == Sizes{1});
  CHECK(merge_optimal(one, model) == Sizes{1});
  CHECK(merge_omgs(two, model, &trace) == Sizes{2});  // never asked
  CHECK(trace.decisions.empty());
  CHECK(merge_optimal(two, model) == Sizes{2});

  // Without backward time: one group.
  const std::vector<LayerCost> at_once(7, {1000, 0});
  const CostModel line = line_model(1e-9, 1e-3, 1e-8);
  CHECK(merge_omgs(at_once, line) == Sizes{7});
  CHECK(merge_mgwfbp(at_once, 1e-3, line.communicate) == Sizes{7});
  CHECK(merge_optimal(at_once, line) == Sizes{7});

  // Without elements: no collective.
  const std::vector<LayerCost> layers = {{0, .1}, {0, .1}, {1000, .1}, {0, .1}};
  for (const Sizes& plan : {merge_omgs(layers, model), merge_mgwfbp(layers, 1e-3, model.communicate),
                            merge_optimal(layers, model)}) {
    CHECK(std::accumulate(plan.begin(), plan.end(), std::size_t{0}) == 4);
    CHECK(evaluate(layers, plan, model).makespan >= 0.4);
  }
  const double least = 0.3 + model.sparsify(1000) + 0.1;  // the message hides behind the last layer
  CHECK(evaluate(layers, merge_optimal(layers, model), model).makespan == Approx(least));
  CHECK(merge_optimal(std::vector<LayerCost>(3, {0, 0}), model) == no_merge(3));
}

TEST_CASE("nothing is merged for one rank, which sends nothing") {
  const auto layers = merge_layers();
  CostModel model = merge_model(2);
  model.communicate = [](double) { return 0.0; };
  CHECK(merge_mgwfbp(layers, 0, model.communicate) == no_merge(14));
  CHECK(merge_optimal(layers, model) == no_merge(14));
  Sizes first_two = no_merge(13);
  first_two[0] = 2;
  CHECK(merge_omgs(layers, model) == first_two);
}

TEST_CASE("the optimal plan equals brute force on 1000 random instances") {
  Draw draw(2020);
  int merged = 0, apart = 0, between = 0;
  for (int i = 0; i < 1000; ++i) {
    const int count = i % 10 == 0 ? 14 : 1 + draw.below(12);
    const Instance instance = draw.instance(count);
    OptimalReport report;
    const Sizes plan = merge_optimal(instance.layers, instance.model, &report);
    INFO("instance " << i << ", " << count << " layers");
    REQUIRE(report.excess == 0);
    const double least = least_by_trying(instance);
    REQUIRE(std::abs(makespan(instance, plan) - least) <= 1e-12 * least);
    if (count > 2) ++(plan.size() == 1 ? merged : plan.size() == instance.layers.size() ? apart : between);
  }
  // The instances are of all kinds.
  CHECK(merged > 50);
  CHECK(apart > 50);
  CHECK(between > 300);
}

TEST_CASE("the optimal plan of many layers is the best of all pairs that no other beats") {
  Draw draw(7);
  for (int i = 0; i < 60; ++i) {
    const Instance instance = draw.instance(30 + draw.below(31));
    OptimalReport report;
    const double best = makespan(instance, merge_optimal(instance.layers, instance.model, &report));
    INFO("instance " << i);
    CHECK(report.excess == 0);
    const double least = least_by_pairs(instance);
    CHECK(std::abs(best - least) <= 1e-12 * least);
  }
}

TEST_CASE("a schedule encodes on the compute thread and sends in order beside it") {
  using Times = std::array<double, 4>;  // ready, encoded, begin, end
  const auto check = [](const std::vector<LayerCost>& layers, const CostModel& model, const Sizes& sizes,
                        const std::vector<Times>& expected) {
    const Timeline timeline = evaluate(layers, sizes, model);
    REQUIRE(timeline.groups.size() == expected.size());
    for (std::size_t g = 0; g < expected.size(); ++g) {
      const auto& group = timeline.groups[g];
      const Times times{group.ready, group.encoded, group.begin, group.end};
      for (std::size_t i = 0; i < 4; ++i) CHECK(times[i] == Approx(expected[g][i]));
    }
    CHECK(timeline.makespan == Approx(expected.back()[3]));
  };
  // Backward 1, 2, 4; selection n / 10; collective 1 + n / 2.
  const std::vector<LayerCost> layers = {{10, 1}, {20, 2}, {10, 4}};
  const CostModel model{[](double n) { return n / 10; }, [](double n) { return 1 + n / 2; }};
  check(layers, model, {1, 1, 1}, {{1, 2, 2, 8}, {4, 6, 8, 19}, {10, 11, 19, 25}});
  check(layers, model, {2, 1}, {{3, 6, 6, 22}, {10, 11, 22, 28}});  // the second group finds the network busy
  // A network that is idle waits for the next group.
  check({{1, 1}, {1, 10}}, {[](double) { return 0.5; }, [](double) { return 2.0; }}, {1, 1},
        {{1, 1.5, 1.5, 3.5}, {11.5, 12, 12, 14}});
}

TEST_CASE("makespans of the fixture are golden; OMGS can be slower than no merging, the optimum not") {
  const auto layers = merge_layers();
  const auto makespan = [&](int ranks, const Sizes& groups) {
    return evaluate(layers, groups, merge_model(ranks)).makespan;
  };
  CHECK(makespan(4, no_merge(14)) == Approx(0.11180).margin(5e-6));
  CHECK(makespan(4, {14}) == Approx(0.12072).margin(5e-6));
  // The authors' plans, by the true timeline.
  CHECK(makespan(2, {4, 3, 1, 2, 2, 1, 1}) == Approx(0.107309).margin(5e-7));
  CHECK(makespan(4, {12, 2}) == Approx(0.115908).margin(5e-7));
  CHECK(makespan(16, {14}) == Approx(0.163221).margin(5e-7));
  CHECK(merge_optimal(layers, merge_model(4)) == Sizes{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2});
  CHECK(makespan(4, merge_optimal(layers, merge_model(4))) == Approx(0.104915).margin(5e-7));
  CHECK(makespan(4, merge_omgs(layers, merge_model(4))) > makespan(4, no_merge(14)));
}

TEST_CASE("schedules and the optimal plan validate groups and costs") {
  const Timeline nothing = evaluate({}, {}, merge_model(2));
  CHECK(nothing.groups.empty());
  CHECK(nothing.makespan == 0);
  const std::vector<LayerCost> layers = {{1, 1}, {1, 1}}, backwards = {{1, -1}, {1, 1}};
  const auto free = [](double) { return 0.0; };
  const auto one = [](double) { return 1.0; };
  const CostModel model{free, one}, negative{[](double) { return -1.0; }, one},
      undefined{free, [](double) { return std::numeric_limits<double>::quiet_NaN(); }};
  for (const Sizes& groups : {Sizes{1}, {3}, {1, 1, 1}, {1, 0, 1}})
    CHECK_THROWS_AS(evaluate(layers, groups, model), Error);
  CHECK_NOTHROW(evaluate(layers, Sizes{1, 1}, model));
  CHECK_THROWS_AS(evaluate(layers, Sizes{2}, negative), Error);
  CHECK_THROWS_AS(evaluate(layers, Sizes{2}, undefined), Error);
  CHECK_THROWS_AS(evaluate(backwards, Sizes{2}, model), Error);
  CHECK_THROWS_AS(merge_optimal(merge_layers(), line_model(-1e-9, 1e-3, 1e-8)), Error);
  CHECK_THROWS_AS(merge_optimal(merge_layers(), line_model(0, 1e-3, -1)), Error);
}
