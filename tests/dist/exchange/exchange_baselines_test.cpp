// Low-rank and quantised methods through the exchange: sums of two rounds, sums and gathers of one.

#include <cmath>
#include <limits>

#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const std::string kMethods[] = {"powersgd", "acpsgd", "signsgd", "qsgd", "terngrad"};
constexpr std::size_t kCompressible = 61;

RunPlan plan_of(const std::string& name, const std::string& merge) {
  RunPlan plan;
  plan.options.compress.name = name;
  plan.options.compress.set("rank", 1);
  plan.options.compress.set("min_compression", 1.0);
  plan.options.merge = merge;
  plan.ranks = 3;
  plan.steps = 20;
  plan.density = 0.1;
  plan.weights = {0.5f, 1.75f, 0.75f};
  return plan;
}

}  // namespace

TEST_CASE("twenty steps of each low-rank and quantised method end in the same bits on three ranks",
          "[exchange]") {
  for (const std::string& name : kMethods)
    for (const std::string merge : {"none", "all"}) {
      INFO(name << ", merge " << merge);
      RunPlan plan = plan_of(name, merge);
      const auto records = run(plan);
      plan.overlaps = true;
      const auto overlapped = run(plan);
      for (int step = 0; step < plan.steps; ++step)
        for (std::size_t rank = 0; rank < 3; ++rank) {
          REQUIRE(records[rank].results[step].committed);
          CHECK(records[rank].averages[step] == records[0].averages[step]);
          CHECK(overlapped[rank].averages[step] == records[0].averages[step]);
          CHECK(overlapped[rank].residuals[step] == records[rank].residuals[step]);
        }
      if (name == "qsgd" || name == "terngrad") continue;
      // With error feedback what was applied and what is left are all gradients of the run.
      for (std::size_t i = 0; i < kCompressible; ++i) {
        double given = 0, there = 0;
        for (std::size_t rank = 0; rank < 3; ++rank) {
          const double weight = plan.weights[rank];
          for (int step = 0; step < plan.steps; ++step)
            given += weight * static_cast<double>(gradient_value(step, static_cast<int>(rank), i));
          there += weight * static_cast<double>(records[rank].residuals.back()[i]);
        }
        for (int step = 0; step < plan.steps; ++step)
          there += 3.0 * static_cast<double>(records[0].averages[step][i]);
        CHECK(there == Approx(given).margin(1e-4));
      }
    }
}

TEST_CASE("a step that one rank sees as not finite is skipped by every low-rank and quantised method",
          "[exchange]") {
  for (const std::string& name : kMethods)
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      INFO(name);
      RunPlan plan = plan_of(name, "none");
      plan.steps = 5;
      RunPlan without = plan;
      plan.gradient = [&](std::int64_t step, int rank, std::size_t i) {
        return step == 2 && rank == 1 && i == 35 ? bad : gradient_value(step, rank, i);
      };
      without.loss_finite = [](std::int64_t step, int) { return step != 2; };
      const auto records = run(plan), clean = run(without);
      for (std::size_t rank = 0; rank < 3; ++rank) {
        CHECK(!records[rank].results[2].committed);
        CHECK(records[rank].results[2].bad_rank == 1);
        CHECK(records[rank].residuals[2] == records[rank].residuals[1]);
        CHECK(records[rank].averages[4] == clean[rank].averages[4]);
        CHECK(records[rank].residuals[4] == clean[rank].residuals[4]);
      }
    }
}
