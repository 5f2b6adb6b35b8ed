// Steps that must leave no trace, and misuse that must not pass.

#include "dist/plan/merge_plan.h"
#include "tests/dist/exchange/exchange_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Run {
  TinyModel model;
  CollectiveQueue queue;
  Exchange exchange;
  int rank;
  Run(Communicator& communicator, const ExchangeOptions& options)
      : queue(communicator), exchange(*model.arena, queue, options), rank(communicator.rank()) {}

  std::vector<float> step(std::int64_t number) {
    exchange.begin_step({.step = number, .density = 0.2});
    backward(exchange, *model.arena, number, rank);
    if (!exchange.finish(true).committed()) throw Error("a finite step was skipped");
    return averages(exchange, model.arena->size());
  }
};

std::vector<std::size_t> ends(const std::vector<Group>& groups) {
  std::vector<std::size_t> result;
  for (const Group& group : groups) result.push_back(group.end);
  return result;
}

}  // namespace

TEST_CASE("a step that any rank sees as not finite is skipped by all and leaves no trace") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  struct Fault {
    int element;  // -1: the loss alone
    float value;
  };
  struct Way {
    std::string name, collective = "all_gather";
  };
  for (const Way& way : {Way{"dense"}, Way{"test_rotate"}, Way{"test_common_scale"}, Way{"topk"},
                         Way{"gaussiank"}, Way{"powersgd"}, Way{"acpsgd"}, Way{"signsgd"}, Way{"qsgd"},
                         Way{"terngrad"}, Way{"topk", "gtopk"}, Way{"topk", "oktopk"}, Way{"dgc", "gtopk"},
                         Way{"dgc", "oktopk"}, Way{"dense", "coded_sum"}, Way{"powersgd", "coded_sum"}})
    for (const std::string merge : {"none", "all"})
      for (const Fault fault :
           {Fault{5, nan}, Fault{35, inf}, Fault{65, nan}, Fault{65, -inf}, Fault{-1, 0}}) {
        INFO(way.name << " by " << way.collective << ", merge " << merge << ", element " << fault.element);
        RunPlan plan = plan_of(way.name, merge);
        plan.steps = 5;
        if (way.collective != "all_gather") plan.ranks = 3;  // no power of two
        plan.options.collective = way.collective;
        plan.options.compress.momentum = way.name == "dgc" ? 0.9 : 0;
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
        without.loss_finite = [](std::int64_t step, int) { return step != 2; };
        // The test's own ranks neither send nor receive, which sparse collectives do.
        const std::string backend = way.collective == "all_gather" ? "" : "threads";
        const auto records = run(plan, backend), clean = run(without, backend);
        const bool compressed = way.name != "dense" && fault.element < 61;
        for (int rank = 0; rank < plan.ranks; ++rank) {
          const StepReport& skipped = records[rank].results[2];
          CHECK(!skipped.committed());
          CHECK(skipped.status.bad_rank == (compressed || fault.element < 0 ? 1 : -1));
          CHECK(records[rank].residuals[2] == records[rank].residuals[1]);
          for (const int step : {3, 4}) {
            CHECK(records[rank].results[step].committed());
            CHECK(records[rank].averages[step] == clean[rank].averages[step]);
            CHECK(records[rank].residuals[step] == clean[rank].residuals[step]);
          }
        }
      }
}

TEST_CASE("of several ranks that are not finite the first one is named") {
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
    for (const RankRecord& record : run(plan)) CHECK(record.results[0].status.bad_rank == 1);
  }
}

TEST_CASE("with one rank a NaN skips the step and names it; a sum that overflows blames no rank") {
  for (const int ranks : {1, 4}) {
    RunPlan plan = plan_of("dense", "all");
    INFO(ranks << " ranks");
    plan.ranks = ranks, plan.steps = 1;
    plan.gradient = [&](std::int64_t, int, std::size_t) {
      return ranks == 1 ? std::nanf("") : std::numeric_limits<float>::max();
    };
    for (const RankRecord& record : run(plan)) {
      CHECK(!record.results[0].committed());
      CHECK(record.results[0].status.bad_rank == (ranks == 1 ? 0 : -1));
    }
  }
}

TEST_CASE("whether a sum could overflow is asked of the weighted values") {
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
      for (const RankRecord& record : run(plan)) CHECK(record.results[0].committed() == light);
    }
}

TEST_CASE("a rank that fails in the middle of a step ends the others' step with its reason") {
  for (const bool overlaps : {false, true}) {
    RunPlan plan = plan_of("test_rotate", "none");
    plan.overlaps = overlaps;
    plan.gradient = [](std::int64_t step, int rank, std::size_t i) {
      if (step == 1 && rank == 2 && i == 40) throw Error("the third rank fell over");
      return gradient_value(step, rank, i);
    };
    CHECK(says(error_text<Error>([&] { run(plan); }), {"the third rank fell over"}));
  }
}

TEST_CASE("calls out of turn are errors") {
  with_exchange({}, [](TestCommunicator&, TinyModel& model, Exchange& exchange) {
    Parameter& head = *model.arena->parameters()[0];
    const std::vector<float> weights{1, 1};
    CHECK_THROWS_AS(exchange.ready(head), Error);                       // outside a step
    CHECK_THROWS_AS(exchange.finish(true), Error);                      // outside a step
    CHECK_THROWS_AS(exchange.averaged(exchange.groups()[0]), Error);    // before a step
    CHECK_THROWS_AS(exchange.begin_step({.density = 0.0}), Error);      // density 0
    CHECK_THROWS_AS(exchange.begin_step({.weights = weights}), Error);  // of two ranks
    exchange.begin_step({.step = 0});
    CHECK_THROWS_AS(exchange.begin_step({.step = 1}), Error);  // twice
    exchange.ready(head);
    CHECK_THROWS_AS(exchange.ready(head), Error);                     // twice
    CHECK_FALSE(exchange.finish(false).committed());                  // a loss that is not finite
    CHECK_THROWS_AS(exchange.averaged(exchange.groups()[0]), Error);  // after a skipped step
  });
}

TEST_CASE("state and residuals saved after some steps continue a run to the bit") {
  for (const std::string& name : compressors().names()) {
    ExchangeOptions options = method(name, "size:160");
    options.compress.momentum = 0.9;
    options.compress.set("threshold", 0.7);
    options.compress.set("min_compression", 1);
    testing::run_ranks(2, false, [&](Communicator& communicator) {
      Run whole(communicator, options), resumed(communicator, options);
      for (std::int64_t step = 0; step < 5; ++step) whole.step(step);
      resumed.exchange.load_state(whole.exchange.state());
      for (const Group& group : whole.exchange.groups()) {
        const auto from = whole.model.arena->residual(group.begin, group.end);
        std::copy(from.begin(), from.end(), resumed.model.arena->residual(group.begin, group.end).begin());
      }
      for (std::int64_t step = 5; step < 9; ++step) {
        const std::vector<float> a = whole.step(step), b = resumed.step(step);
        if (a != b) throw Error(name + ": step " + std::to_string(step) + " differs after a restart");
      }
    });
  }
}

TEST_CASE("state of another plan, or damaged, is refused") {
  testing::run_ranks(1, false, [&](Communicator& communicator) {
    Run all(communicator, method("topk")), none(communicator, method("topk", "none"));
    const auto good = all.exchange.state();
    auto longer = good;
    longer.push_back(std::byte{7});
    CHECK_THROWS_AS(none.exchange.load_state(good), Error);
    CHECK_THROWS_AS(all.exchange.load_state({good.begin(), good.end() - 1}), Error);
    CHECK_THROWS_AS(all.exchange.load_state(longer), Error);
  });
}

TEST_CASE("merge none, all and size:BYTES make the groups they promise") {
  TinyModel model;  // conv 12, head 33, unused 6, middle 10 | bias 7
  CHECK(ends(cut_groups(*model.arena, true, "group", "none")) ==
        std::vector<std::size_t>{12, 45, 51, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "all")) == std::vector<std::size_t>{61, 68});
  CHECK(ends(cut_groups(*model.arena, false, "group", "all")) == std::vector<std::size_t>{68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "size:88")) == std::vector<std::size_t>{12, 45, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "size:196")) == std::vector<std::size_t>{45, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "tensor", "size:99999")) == std::vector<std::size_t>{61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "model", "all")) == std::vector<std::size_t>{61, 68});
}

TEST_CASE("fragments are strided: each has every F-th layer, and they cut the groups") {
  TinyModel model;  // conv 12, head 33, unused 6, middle 10 | bias 7
  const auto fragments = [&](const std::string& merge, int count) {
    std::vector<std::pair<std::size_t, int>> parts;  // ends
    for (const Group& group : in_fragments(cut_groups(*model.arena, true, "group", merge), count))
      parts.emplace_back(group.end, group.fragment);
    return parts;
  };
  using Parts = std::vector<std::pair<std::size_t, int>>;
  CHECK(fragments("all", 1) == Parts{{61, 0}, {68, 0}});
  CHECK(fragments("all", 2) == Parts{{12, 0}, {51, 0}, {68, 0}, {45, 1}, {61, 1}});
  CHECK(fragments("all", 3) == Parts{{12, 0}, {61, 0}, {45, 1}, {68, 1}, {51, 2}});
  CHECK(fragments("none", 4) == Parts{{12, 0}, {68, 0}, {45, 1}, {51, 2}, {61, 3}});
  CHECK(fragments("all", 5) == Parts{{12, 0}, {45, 1}, {51, 2}, {61, 3}, {68, 4}});
  CHECK_THROWS_AS(fragments("all", 6), UserError);

  ParameterStore store;
  for (const std::string name :
       {"wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "h.1.mlp.weight"})
    store.add(name, {2, 2}, [](std::span<float>, const CounterRng&) {});
  const ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
  std::vector<std::pair<std::string, int>> first;  // parameters of groups
  for (const Group& group : in_fragments(cut_groups(arena, true, "group", "all"), 2))
    first.emplace_back(group.parameters.front()->name(), group.fragment);
  CHECK(first == std::vector<std::pair<std::string, int>>{
                     {"h.1.mlp.weight", 0}, {"wte.weight", 0}, {"h.0.mlp.weight", 1}});
}

TEST_CASE("auto makes buckets, the first one small, and one group where the scope is the model") {
  constexpr std::size_t mib = std::size_t{1} << 20;
  const std::vector<std::size_t> bytes{mib / 2, mib / 2, 4, 20 * mib, 5 * mib - 4, 4, 30 * mib, 1};
  const Merge buckets = parse_merge(resolve_merge("auto", false, "group"));
  CHECK(buckets.name == "buckets");
  CHECK(buckets.rule->cut(bytes, 0) == std::vector<std::size_t>{2, 3, 1, 1, 1});
  CHECK(resolve_merge("auto", true, "tensor") == "buckets");
  CHECK(resolve_merge("auto", false, "model") == "buckets");  // dense has no scope
  CHECK(resolve_merge("auto", true, "model") == "all");
  CHECK(resolve_merge("size:4096", true, "group") == "size:4096");
  TinyModel model;
  CHECK(ends(cut_groups(*model.arena, true, "model", "auto")) == std::vector<std::size_t>{61, 68});
}

TEST_CASE("scope tensor gives a compressor one range a parameter, the others one in all") {
  TinyModel model;
  const auto groups = cut_groups(*model.arena, true, "tensor", "all");
  using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;
  CHECK(group_spec(groups[0], "tensor", 2).segments == Ranges{{0, 12}, {12, 45}, {45, 51}, {51, 61}});
  CHECK(group_spec(groups[1], "tensor", 2).segments == Ranges{{0, 7}});
  CHECK(group_spec(groups[0], "group", 2).segments == Ranges{{0, 61}});
  CHECK(group_spec(groups[0], "model", 2).numel == 61);
  CHECK(group_spec(groups[1], "group", 2).offset == 61);  // what random choices are keyed by
}

TEST_CASE("invalid exchange options are errors that name their key") {
  TinyModel model;
  for (const char* merge : {"some", "size:", "size:0", "size:4MB", "size:-4"})
    CHECK_USER_ERROR(cut_groups(*model.arena, true, "group", merge), "exchange.merge");
  CHECK_USER_ERROR(cut_groups(*model.arena, true, "layer", "all"), "compress.scope");
  CHECK_USER_ERROR(cut_groups(*model.arena, true, "model", "none"), "compress.scope");
}
