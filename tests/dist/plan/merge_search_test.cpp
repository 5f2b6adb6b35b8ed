#include "dist/plan/schedule.h"

#include <numeric>

#include "nn/base/check.h"
#include "tests/dist/plan/merge_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// alpha + elements * beta, nothing for nothing.
CostModel line_model(double sparsify, double alpha, double beta) {
  return {[=](double n) { return sparsify * n; }, [=](double n) { return n > 0 ? alpha + beta * n : 0; }};
}

}  // namespace

TEST_CASE("OMGS takes the authors' decisions on 2 ranks", "[merge]") {
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

TEST_CASE("OMGS merges as the authors' code does for 4 and 16 ranks and for equal layers", "[merge]") {
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

TEST_CASE("OMGS can be slower than no merging, and the optimum is not", "[merge]") {
  const auto layers = merge_layers();
  const CostModel model = merge_model(4);
  const double apart = evaluate(layers, no_merge(14), model).makespan;
  CHECK(evaluate(layers, merge_omgs(layers, model), model).makespan > apart);
  CHECK(evaluate(layers, merge_optimal(layers, model), model).makespan < apart);
}

TEST_CASE("OMGS and MG-WFBP do not wait where waiting saves just what it costs", "[merge]") {
  const CostModel model = line_model(0, 0.5, 0.25);
  const std::vector<LayerCost> three = {{1, 1}, {1, 10}, {1, 0.5}};
  OmgsTrace trace;
  CHECK(merge_omgs(three, model, &trace) == Sizes{2, 1});
  REQUIRE(trace.decisions.size() == 1);
  CHECK((trace.decisions[0].wait == 0.5 && trace.decisions[0].save == 0.5));
  const std::vector<LayerCost> two = {{4, 1}, {4, 0.5}};
  CHECK(merge_mgwfbp(two, 0.5, model.communicate) == Sizes{1, 1});
}

TEST_CASE("MG-WFBP merges while the network is busy until the next layer is ready", "[merge]") {
  // Ready at 1, 3, 5, 7; alpha is 1. The first message begins at 1, when the second layer is neither ready nor
  // due within alpha: on its own, until 11. The others are all ready by then: one group.
  const std::vector<LayerCost> layers = {{9, 1}, {1, 2}, {1, 2}, {1, 2}};
  const CostModel model = line_model(0, 1, 1);
  CHECK(merge_mgwfbp(layers, 1, model.communicate) == Sizes{1, 3});
}

TEST_CASE("MG-WFBP waits for a layer that is ready within alpha", "[merge]") {
  const CostModel model = line_model(0, 1, 1);
  const auto plan = [&](double wait) {
    const std::vector<LayerCost> layers = {{9, 1}, {9, wait}};
    return merge_mgwfbp(layers, 1, model.communicate);
  };
  CHECK(plan(0.5) == Sizes{2});
  CHECK(plan(1.5) == Sizes{1, 1});
  // Within alpha, but this message would have ended before.
  const std::vector<LayerCost> layers = {{9, 1}, {9, .5}};
  CHECK(merge_mgwfbp(layers, 1, [](double) { return 0.25; }) == Sizes{1, 1});
}

TEST_CASE("plans for no, one and two layers", "[merge]") {
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
}

TEST_CASE("layers without backward time are sent as one group", "[merge]") {
  const std::vector<LayerCost> layers(7, {1000, 0});
  const CostModel model = line_model(1e-9, 1e-3, 1e-8);
  CHECK(merge_omgs(layers, model) == Sizes{7});
  CHECK(merge_mgwfbp(layers, 1e-3, model.communicate) == Sizes{7});
  CHECK(merge_optimal(layers, model) == Sizes{7});
}

TEST_CASE("nothing is merged for one rank, which sends nothing", "[merge]") {
  const auto layers = merge_layers();
  CostModel model = merge_model(2);
  model.communicate = [](double) { return 0.0; };
  CHECK(merge_mgwfbp(layers, 0, model.communicate) == no_merge(14));
  CHECK(merge_optimal(layers, model) == no_merge(14));
  Sizes first_two = no_merge(13);
  first_two[0] = 2;
  CHECK(merge_omgs(layers, model) == first_two);
}

TEST_CASE("layers without elements cost no collective", "[merge]") {
  const std::vector<LayerCost> layers = {{0, .1}, {0, .1}, {1000, .1}, {0, .1}};
  const CostModel model = merge_model(4);
  for (const Sizes& plan : {merge_omgs(layers, model), merge_mgwfbp(layers, 1e-3, model.communicate),
                            merge_optimal(layers, model)}) {
    CHECK(std::accumulate(plan.begin(), plan.end(), std::size_t{0}) == 4);
    CHECK(evaluate(layers, plan, model).makespan >= 0.4);
  }
  const double least = 0.3 + model.sparsify(1000) + 0.1;  // the message hides behind the last layer
  CHECK(evaluate(layers, merge_optimal(layers, model), model).makespan == Approx(least));
  const std::vector<LayerCost> nothing(3, {0, 0});
  CHECK(merge_optimal(nothing, model) == no_merge(3));
}

TEST_CASE("the optimal plan validates costs", "[merge]") {
  CHECK_THROWS_AS(merge_optimal(merge_layers(), line_model(-1e-9, 1e-3, 1e-8)), Error);
  CHECK_THROWS_AS(merge_optimal(merge_layers(), line_model(0, 1e-3, -1)), Error);
}
