#include "dist/plan/schedule.h"

#include <limits>

#include "nn/base/check.h"
#include "tests/dist/plan/merge_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("a schedule encodes on the compute thread and sends in order beside it", "[merge]") {
  // Backward 1, 2, 4; selection n / 10; collective 1 + n / 2.
  const std::vector<LayerCost> layers = {{10, 1}, {20, 2}, {10, 4}};
  const CostModel model{[](double n) { return n / 10; }, [](double n) { return 1 + n / 2; }};
  const Timeline timeline = evaluate(layers, Sizes{1, 1, 1}, model);
  const double expected[3][4] = {{1, 2, 2, 8}, {4, 6, 8, 19}, {10, 11, 19, 25}};
  REQUIRE(timeline.groups.size() == 3);
  for (int g = 0; g < 3; ++g) {
    CHECK(timeline.groups[g].ready == Approx(expected[g][0]));
    CHECK(timeline.groups[g].encoded == Approx(expected[g][1]));
    CHECK(timeline.groups[g].begin == Approx(expected[g][2]));
    CHECK(timeline.groups[g].end == Approx(expected[g][3]));
  }
  CHECK(timeline.makespan == Approx(25));

  const Timeline merged = evaluate(layers, Sizes{2, 1}, model);  // the second group finds the network busy
  REQUIRE(merged.groups.size() == 2);
  CHECK(merged.groups[0].ready == Approx(3));
  CHECK(merged.groups[0].encoded == Approx(6));
  CHECK(merged.groups[1].ready == Approx(10));
  CHECK(merged.groups[1].encoded == Approx(11));
  CHECK(merged.groups[1].begin == Approx(22));
  CHECK(merged.makespan == Approx(28));
}

TEST_CASE("a network that is idle waits for the next group", "[merge]") {
  const std::vector<LayerCost> layers = {{1, 1}, {1, 10}};
  const CostModel model{[](double) { return 0.5; }, [](double) { return 2.0; }};
  const Timeline timeline = evaluate(layers, Sizes{1, 1}, model);
  CHECK(timeline.groups[0].end == Approx(3.5));
  CHECK(timeline.groups[1].begin == Approx(12));
  CHECK(timeline.makespan == Approx(14));
}

TEST_CASE("makespans of the fixture are the golden ones", "[merge]") {
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
  CHECK(makespan(4, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2}) == Approx(0.104915).margin(5e-7));
}

TEST_CASE("a schedule without layers takes no time", "[merge]") {
  const Timeline timeline = evaluate({}, {}, merge_model(2));
  CHECK(timeline.groups.empty());
  CHECK(timeline.makespan == 0);
}

TEST_CASE("a schedule validates groups and costs", "[merge]") {
  const std::vector<LayerCost> layers = {{1, 1}, {1, 1}};
  const CostModel model{[](double) { return 0.0; }, [](double) { return 1.0; }};
  CHECK_THROWS_AS(evaluate(layers, Sizes{1}, model), Error);
  CHECK_THROWS_AS(evaluate(layers, Sizes{3}, model), Error);
  CHECK_THROWS_AS(evaluate(layers, Sizes{1, 1, 1}, model), Error);
  CHECK_THROWS_AS(evaluate(layers, Sizes{1, 0, 1}, model), Error);
  CHECK_NOTHROW(evaluate(layers, Sizes{1, 1}, model));
  const CostModel negative{[](double) { return -1.0; }, model.communicate};
  CHECK_THROWS_AS(evaluate(layers, Sizes{2}, negative), Error);
  const CostModel undefined{model.sparsify, [](double) { return std::numeric_limits<double>::quiet_NaN(); }};
  CHECK_THROWS_AS(evaluate(layers, Sizes{2}, undefined), Error);
  const std::vector<LayerCost> backwards = {{1, -1}, {1, 1}};
  CHECK_THROWS_AS(evaluate(backwards, Sizes{2}, model), Error);
}
