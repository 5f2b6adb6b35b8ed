// Gradient to weight: exchange and optimizer together.

#include "compress/compressor.h"
#include "optim/optimizer.h"
#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/same_bits.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Weights {
  std::vector<std::vector<float>> by_step;
  std::vector<float> residual;
};

// Trains a fresh model on given gradients with SGD.
template <class Model>
Weights train_rank(Communicator& communicator, const RunPlan& plan, const OptimizerOptions& sgd) {
  Weights record;
  Model model;
  CollectiveQueue queue(communicator);
  Exchange exchange(*model.arena, queue, plan.options);
  const auto optimizer = make_optimizer(sgd, *model.arena);
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    exchange.begin_step(step, plan.density);
    model.arena->clear_gradients();
    for (Parameter* parameter : model.arena->parameters()) {
      write_gradient(*parameter, step, communicator.rank(), plan.gradient);
      exchange.ready(*parameter);
    }
    if (exchange.finish(true).committed)
      for (const Group& group : exchange.groups())
        optimizer->update(group.begin, exchange.averaged(group), {step, sgd.lr});
    const auto weights = model.arena->weights();
    record.by_step.emplace_back(weights.begin(), weights.end());
  }
  record.residual = residuals(exchange, *model.arena);
  return record;
}

// The records by rank. An empty backend stands for the test's own.
template <class Model>
std::vector<Weights> train(const RunPlan& plan, const OptimizerOptions& sgd,
                           const std::string& backend = "") {
  std::vector<Weights> records(static_cast<std::size_t>(plan.ranks));
  const auto body = [&](Communicator& communicator) {
    records[static_cast<std::size_t>(communicator.rank())] = train_rank<Model>(communicator, plan, sgd);
  };
  if (backend.empty())
    testing::run_ranks(plan.ranks, plan.overlaps, body);
  else
    topknot::run_ranks(backend, plan.ranks, body);
  return records;
}

}  // namespace

// A golden trace, computed in exact arithmetic: d = 4, k = 1, two ranks, lr 0.1. Gradients are ten
// times as large here, so that they are whole numbers and ties are exact, and lr is a tenth.
TEST_CASE("topk with error feedback and momentum follows the golden trace", "[exchange]") {
  RunPlan plan;
  plan.options.compress.name = "topk";
  plan.density = 0.25;
  plan.steps = 4;
  plan.gradient = [](std::int64_t t, int rank, std::size_t j) {
    return static_cast<float>((3 * t + 5 * rank + 7 * static_cast<std::int64_t>(j)) % 11 - 5);
  };
  OptimizerOptions sgd;
  sgd.lr = 0.01;
  sgd.momentum = 0.9;
  const double expected[4][4] = {
      {1.025, 1.02, 1, 1}, {1.0325, 1.003, 1, 1}, {1.03925, 1.0027, 1, 0.97}, {1.080325, 1.00243, 1, 0.918}};
  for (const bool overlaps : {false, true}) {
    plan.overlaps = overlaps;
    const auto records = train<FourWeights>(plan, sgd);
    for (const Weights& record : records)
      for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
          CHECK(record.by_step[step][i] == Approx(expected[step][i]).epsilon(0).margin(5e-7));
    CHECK(same_bits(records[0].by_step[3], records[1].by_step[3]));
    CHECK(records[0].residual == std::vector<float>{3, 0, -1, 0});
    CHECK(records[1].residual == std::vector<float>{0, 6, -3, -3});
  }
}

TEST_CASE("topk of density 1 trains as dense does: the same bits with one rank, else within rounding",
          "[exchange]") {
  OptimizerOptions sgd;
  sgd.momentum = 0.9;
  sgd.weight_decay = 1e-3;
  for (const int ranks : {1, 3, 4}) {
    RunPlan plan;
    plan.ranks = ranks;
    plan.steps = 6;
    plan.options.compress.name = "dense";
    const auto dense = train<TinyModel>(plan, sgd);
    for (const std::string merge : {"none", "all"})
      for (const std::string scope : {"group", "tensor"}) {
        plan.options.compress.name = "topk";
        plan.options.merge = merge;
        plan.options.scope = scope;
        const auto topk = train<TinyModel>(plan, sgd);
        for (int rank = 0; rank < ranks; ++rank) {
          CHECK(same_bits(topk[rank].by_step.back(), topk[0].by_step.back()));
          if (ranks == 1) CHECK(same_bits(topk[rank].by_step.back(), dense[rank].by_step.back()));
          for (std::size_t i = 0; i < dense[rank].by_step.back().size(); ++i)
            REQUIRE(topk[rank].by_step.back()[i] == Approx(dense[rank].by_step.back()[i]).margin(1e-5));
        }
      }
  }
}

TEST_CASE("every compressor leaves the same weights on all ranks and on every backend", "[exchange]") {
  OptimizerOptions sgd;
  sgd.momentum = 0.9;
  for (const std::string& name : compressors().names())
    for (const int ranks : {1, 2, 4, 8}) {
      RunPlan plan;
      plan.ranks = ranks;
      plan.steps = 10;
      plan.density = 0.1;
      plan.options.compress.name = name;
      plan.options.compress.momentum = sgd.momentum;
      plan.options.compress.set("threshold", 0.5);
      plan.options.merge = "size:100";
      plan.options.ordered_sum = true;
      const std::vector<float> expected = train<TinyModel>(plan, sgd)[0].by_step.back();
      for (const std::string backend : {"threads", "gloo"})
        for (const Weights& record : train<TinyModel>(plan, sgd, backend)) {
          INFO(name << " over " << backend << " with " << ranks << " ranks");
          CHECK(same_bits(record.by_step.back(), expected));
        }
    }
}
