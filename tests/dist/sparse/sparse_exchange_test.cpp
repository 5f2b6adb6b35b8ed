// Sparse collectives through the whole exchange: residuals, weights, skipped steps, refusals.

#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/support/same_bits.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

RunPlan plan_of(const std::string& collective, const std::string& name, int ranks) {
  RunPlan plan;
  plan.options.compress.name = name;
  plan.options.collective = collective;
  plan.options.merge = "size:100";
  plan.ranks = ranks;
  plan.density = 0.1;
  return plan;
}

constexpr std::size_t kCompressible = 61;  // of the tiny model

}  // namespace

// Golden values: exact arithmetic, ties by lower index; the learning rate is a tenth of the trace's.
TEST_CASE("gtopk of four ranks trains as the golden trace") {
  RunPlan plan = plan_of("gtopk", "topk", 4);
  plan.steps = 3;
  plan.density = 0.25;
  plan.gradient = golden_gradient;
  OptimizerOptions sgd;
  sgd.lr = 0.01;
  sgd.momentum = 0;
  const auto records = train<FourWeights>(plan, sgd);
  for (const TrainedRank& record : records) {
    CHECK(record.averages[0] == std::vector<float>{0, 0, 0, 0});
    CHECK(record.averages[1] == std::vector<float>{0, 0, 0, 0});
    CHECK(record.averages[2] == std::vector<float>{1.5f, 0, 0, 0});
    CHECK(record.weights[2][0] == Approx(0.985).epsilon(0).margin(1e-7));
    for (int i = 1; i < 4; ++i) CHECK(record.weights[2][i] == 1.0f);
  }
  // Step 0: ranks 0 and 2 cancel at position 0; what ranks 1 and 3 sent returns.
  CHECK(records[0].residuals[0][0] == 0);
  CHECK(records[2].residuals[0][0] == 0);
  CHECK(records[1].residuals[0][1] == -4);
  CHECK(records[3].residuals[0][1] == -5);
}

TEST_CASE("residuals and what was applied are the gradients that came in, on bit-identical ranks") {
  for (const std::string collective : {"gtopk", "oktopk"})
    for (const std::string name : {"topk", "dgc", "regtopk", "gaussiank", "randk"})
      for (const int ranks : {2, 3, 5, 8}) {
        if (ranks != 3 && (name == "gaussiank" || name == "randk")) continue;
        RunPlan plan = plan_of(collective, name, ranks);
        plan.steps = 50;
        plan.options.compress.momentum = name == "dgc" ? 0.9 : 0.0;
        if (ranks == 3) plan.weights = {0.5f, 0.75f, 1.75f};
        const auto records = train<TinyModel>(plan);
        INFO(collective << " of " << name << " with " << ranks << " ranks");
        const auto weight = [&](int rank) {
          return plan.weights.empty() ? 1.0 : static_cast<double>(plan.weights[rank]);
        };
        std::vector<double> in(kCompressible), scale(kCompressible), applied(kCompressible);
        for (int step = 0; step < plan.steps; ++step)
          for (std::size_t i = 0; i < kCompressible; ++i) {
            // Within the step: u is split between the average and the residuals.
            const double average = ranks * static_cast<double>(records[0].averages[step][i]);
            double u = 0, size = 0, left = 0;
            for (int rank = 0; rank < ranks; ++rank) {
              u += weight(rank) * static_cast<double>(records[rank].accumulated[step][i]);
              size += weight(rank) * std::fabs(static_cast<double>(records[rank].accumulated[step][i]));
              left += weight(rank) * static_cast<double>(records[rank].residuals[step][i]);
              const double g = static_cast<double>(gradient_value(step, rank, i));
              in[i] += weight(rank) * g;
              scale[i] += weight(rank) * std::fabs(g);
            }
            REQUIRE(std::fabs(left + average - u) <= 1e-6 * size);
            applied[i] += average;
          }
        // Over all steps; DGC's momentum makes more of a gradient than came in.
        for (std::size_t i = 0; i < kCompressible && name != "dgc"; ++i) {
          double out = applied[i];
          for (int rank = 0; rank < ranks; ++rank)
            out += weight(rank) * static_cast<double>(records[rank].residuals.back()[i]);
          CHECK(std::fabs(out - in[i]) <= 1e-6 * scale[i]);
        }
        for (const TrainedRank& record : records) {
          CHECK(same_bits(record.weights.back(), records[0].weights.back()));
          CHECK(record.results.back().bytes_sent > 0);
        }
      }
}

TEST_CASE("a sparse collective over TCP, beside the backward pass, leaves the bits of threads") {
  for (const std::string collective : {"gtopk", "oktopk"})
    for (const int ranks : {2, 3, 5}) {
      RunPlan plan = plan_of(collective, "topk", ranks);
      plan.options.compress.codec = "auto";
      plan.steps = 8;
      const auto threads = train<TinyModel>(plan), gloo = train<TinyModel>(plan, {}, "gloo");
      for (int rank = 0; rank < ranks; ++rank) {
        INFO(collective << " with " << ranks << " ranks");
        CHECK(same_bits(gloo[rank].weights.back(), threads[0].weights.back()));
        CHECK(same_bits(gloo[rank].residuals.back(), threads[rank].residuals.back()));
        CHECK(gloo[rank].results.back().bytes_sent == threads[rank].results.back().bytes_sent);
        CHECK(gloo[rank].results.back().bytes_received == threads[rank].results.back().bytes_received);
      }
    }
}

TEST_CASE("ef21's estimates move by what the sum kept") {
  for (const std::string collective : {"gtopk", "oktopk"}) {
    RunPlan plan = plan_of(collective, "topk", 3);
    plan.options.compress.memory = "ef21";
    plan.steps = 12;
    const auto records = train<TinyModel>(plan);
    // The residual holds -h of each rank, and the average is that of all h.
    for (int step = 0; step < plan.steps; ++step)
      for (std::size_t i = 0; i < kCompressible; ++i) {
        double estimates = 0;
        for (const TrainedRank& record : records) estimates -= static_cast<double>(record.residuals[step][i]);
        CHECK(records[0].averages[step][i] == Approx(estimates / 3).margin(1e-5));
      }
  }
}

TEST_CASE("entries that a sum dropped keep their velocity under DGC") {
  // Rank 1's 1 at position 1 loses to rank 0's 10, so it goes on growing by its velocity: 1 + 0.9. Once it
  // has won, nothing of it is left.
  RunPlan plan = plan_of("gtopk", "dgc", 2);
  plan.density = 0.25;
  plan.steps = 3;
  plan.options.compress.momentum = 0.9;
  plan.gradient = [](std::int64_t step, int rank, std::size_t i) {
    return step > 0 || static_cast<int>(i) != rank ? 0.0f : rank == 0 ? 10.0f : 1.0f;
  };
  for (const TrainedRank& record : train<FourWeights>(plan)) {
    CHECK(record.averages[0] == std::vector<float>{5, 0, 0, 0});
    CHECK(record.averages[1][0] == 0);
    CHECK(record.averages[1][1] == Approx(0.95));
    CHECK(record.averages[2] == std::vector<float>{0, 0, 0, 0});
  }
}

TEST_CASE("a sparse collective of a method that sends no entries, or rounds them, is one error") {
  const auto refused = [](const std::function<void(ExchangeOptions&)>& change) {
    ExchangeOptions options;
    options.compress.name = "topk";
    options.collective = "gtopk";
    change(options);
    return refusal(options);
  };
  const std::string key = "exchange.collective";
  for (const std::string name : {"powersgd", "dense"})
    CHECK(
        says(refused([&](auto& options) { options.compress.name = name; }), {"compress.name: " + name, key}));
  CHECK(
      says(refused([](auto& options) { options.compress.values = "fp16"; }), {"compress.values: fp16", key}));
  CHECK(says(refused([](auto& options) { options.compress.aggregate = "contributors"; }),
             {"compress.aggregate=ranks", key}));
  CHECK(says(refused([](auto& options) { options.collective = "gtopp"; }), {"gtopk", key}));
  CHECK(refused([](auto&) {}).empty());
}

TEST_CASE("what a sparse collective has learnt goes from each committed step to the next") {
  const RunPlan plan = plan_of("oktopk", "topk", 2);
  std::vector<std::vector<std::byte>> states(4);
  topknot::run_ranks("threads", plan.ranks, [&](Communicator& communicator) {
    TinyModel model;
    CollectiveQueue queue(communicator);
    Exchange exchange(*model.arena, queue, plan.options);
    for (std::size_t step = 0; step < states.size(); ++step) {
      exchange.begin_step({.step = static_cast<std::int64_t>(step), .density = plan.density});
      backward(exchange, *model.arena, static_cast<std::int64_t>(step), communicator.rank());
      exchange.finish(step != 2);
      if (communicator.rank() == 0) states[step] = exchange.state();
    }
  });
  CHECK(states[1] != states[0]);
  CHECK(states[2] == states[1]);  // the step was skipped
  CHECK(states[3] != states[2]);
}
