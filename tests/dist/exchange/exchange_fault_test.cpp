// Steps that must leave no trace, and misuse that must not pass.

#include <cmath>
#include <limits>

#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

RunPlan plan_of(const std::string& name, const std::string& merge) {
  RunPlan plan;
  plan.options.compress.name = name;
  plan.options.merge = merge;
  plan.ranks = 4;
  plan.steps = 4;
  plan.density = 0.2;
  return plan;
}

}  // namespace

TEST_CASE("a step that any rank sees as not finite is skipped by all and leaves no trace", "[exchange]") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  struct Fault {
    int element;  // -1: the loss alone
    float value;
  };
  for (const std::string name : {"dense", "test_rotate", "test_common_scale", "topk", "gaussiank"})
    for (const std::string merge : {"none", "all"})
      for (const Fault fault :
           {Fault{5, nan}, Fault{35, inf}, Fault{65, nan}, Fault{65, -inf}, Fault{-1, 0}}) {
        RunPlan plan = plan_of(name, merge);
        plan.overlaps = merge == "none";
        // The same but for a step 2 that happens to no rank: gradients of all later steps are the same.
        RunPlan without = plan;
        plan.gradient = [&](std::int64_t step, int rank, std::size_t i) {
          return step == 2 && rank == 1 && static_cast<int>(i) == fault.element
                     ? fault.value
                     : gradient_value(step, rank, i);
        };
        if (fault.element < 0)
          plan.loss_finite = [](std::int64_t step, int rank) { return step != 2 || rank != 1; };
        const auto records = run(plan);
        without.loss_finite = [](std::int64_t step, int) { return step != 2; };
        const auto clean = run(without);
        const bool compressed = name != "dense" && fault.element < 61;
        for (int rank = 0; rank < plan.ranks; ++rank) {
          const StepResult& skipped = records[rank].results[2];
          CHECK(!skipped.committed);
          CHECK(skipped.bad_rank == (compressed || fault.element < 0 ? 1 : -1));
          CHECK(records[rank].residuals[2] == records[rank].residuals[1]);
          CHECK(records[rank].results[3].committed);
          CHECK(records[rank].averages[3] == clean[rank].averages[3]);
          CHECK(records[rank].residuals[3] == clean[rank].residuals[3]);
        }
      }
}

TEST_CASE("of several ranks that are not finite the first one is named", "[exchange]") {
  for (const bool by_loss : {false, true}) {
    RunPlan plan = plan_of("topk", "all");
    plan.steps = 1;
    const auto bad = [](int rank) { return rank == 1 || rank == 3; };
    if (by_loss)
      plan.loss_finite = [&](std::int64_t, int rank) { return !bad(rank); };
    else
      plan.gradient = [&](std::int64_t step, int rank, std::size_t i) {
        return bad(rank) && i == 5 ? std::nanf("") : gradient_value(step, rank, i);
      };
    for (const RankRecord& record : run(plan)) CHECK(record.results[0].bad_rank == 1);
  }
}

TEST_CASE("with one rank, a NaN skips the step and names the rank", "[exchange]") {
  RunPlan plan = plan_of("dense", "all");
  plan.ranks = plan.steps = 1;
  plan.gradient = [](std::int64_t, int, std::size_t) { return std::nanf(""); };
  const StepResult result = run(plan)[0].results[0];
  CHECK(!result.committed);
  CHECK(result.bad_rank == 0);
}

TEST_CASE("finite gradients whose sum overflows skip the step too, and no rank is blamed", "[exchange]") {
  RunPlan plan = plan_of("dense", "all");
  plan.steps = 1;
  plan.gradient = [](std::int64_t, int, std::size_t) { return std::numeric_limits<float>::max(); };
  for (const RankRecord& record : run(plan)) {
    CHECK(!record.results[0].committed);
    CHECK(record.results[0].bad_rank == -1);
  }
}

TEST_CASE("whether a sum could overflow is asked of the weighted values", "[exchange]") {
  for (const std::string name : {"topk", "signsgd"})
    for (const bool light : {false, true}) {
      INFO(name << (light ? ", light" : ", heavy"));
      RunPlan plan = plan_of(name, "all");
      plan.ranks = 3;
      plan.steps = 1;
      plan.weights = light ? std::vector<float>{0.5f, 0.5f, 2.0f} : std::vector<float>{1.4f, 1.4f, 0.2f};
      const float large = light ? 2e38f : 1.3e38f;  // of two ranks; a float ends at 3.4e38
      plan.gradient = [&](std::int64_t, int rank, std::size_t i) {
        return rank < 2 && i < 61 ? large : 1.0f;
      };
      for (const RankRecord& record : run(plan)) CHECK(record.results[0].committed == light);
    }
}

TEST_CASE("a rank that fails in the middle of a step ends the others' step with its reason", "[exchange]") {
  for (const bool overlaps : {false, true}) {
    RunPlan plan = plan_of("test_rotate", "none");
    plan.overlaps = overlaps;
    plan.gradient = [](std::int64_t step, int rank, std::size_t i) {
      if (step == 1 && rank == 2 && i == 40) throw Error("the third rank fell over");
      return gradient_value(step, rank, i);
    };
    std::string message;
    try {
      run(plan);
    } catch (const Error& error) {
      message = error.what();
    }
    CHECK(message.find("the third rank fell over") != std::string::npos);
  }
}

TEST_CASE("calls out of turn are errors", "[exchange]") {
  run_ranks(1, false, [](TestCommunicator& communicator) {
    TinyModel model;
    CollectiveQueue queue(communicator);
    Exchange exchange(*model.arena, queue, {});
    Parameter& head = *model.arena->parameters()[0];
    const auto fails = [](const char* what, const std::function<void()>& call) {
      try {
        call();
      } catch (const Error&) {
        return;
      }
      throw Error(std::string("no error from ") + what);
    };
    fails("ready outside a step", [&] { exchange.ready(head); });
    fails("finish outside a step", [&] { exchange.finish(true); });
    fails("an average before a step", [&] { exchange.averaged(exchange.groups()[0]); });
    fails("density 0", [&] { exchange.begin_step(0, 0.0); });
    fails("weights of two ranks", [&] { exchange.begin_step(0, 1.0, std::vector<float>{1, 1}); });
    exchange.begin_step(0, 1.0);
    fails("begin_step twice", [&] { exchange.begin_step(1, 1.0); });
    exchange.ready(head);
    fails("ready twice", [&] { exchange.ready(head); });
    TOPKNOT_CHECK(!exchange.finish(false).committed, "a loss that is not finite");
    fails("an average after a skipped step", [&] { exchange.averaged(exchange.groups()[0]); });
  });
  SUCCEED();
}
