#pragma once
// A small model, two compressors made for the exchange's tests, and the way of a step with given gradients.
//
// "test_rotate": error feedback, blocks; at step t it sends the entries i of u = g + residual with (i + t) %
// 3 == 0. "test_common_scale": two rounds; a gather of each rank's largest magnitude, then a sum of u in
// whole multiples of the common scale, with the rounding error as residual.

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "nn/core/rng.h"
#include "optim/optimizer.h"
#include "tests/dist/ranks.h"
#include "tests/support/test_ranks.h"

namespace topknot::testing {

// Registration order conv, bias, middle, unused, head; so in the arena: conv, head, unused, middle | bias.
struct TinyModel {
  ParameterStore store;
  ParameterArena* arena;
  TinyModel() {
    const auto ones = [](std::span<float> values, const CounterRng&) {
      for (float& value : values) value = 1;
    };
    store.add("conv", {3, 4}, ones);
    store.add("bias", {7}, ones);
    store.add("middle", {5, 2}, ones);
    store.add("unused", {2, 3}, ones);
    store.add("head", {11, 3}, ones);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }
};

// One parameter of four elements, all 1, for traces that are followed by hand.
struct FourWeights {
  ParameterStore store;
  ParameterArena* arena;
  FourWeights() {
    store.add("w", {4}, [](std::span<float> values, const CounterRng&) {
      for (float& value : values) value = 1;
    });
    arena = &store.build([](const Parameter&) { return true; }, 1);
  }
};

// What a rank's gradient is in the tests: random, by step, rank and place in the arena.
inline float gradient_value(std::int64_t step, int rank, std::size_t element) {
  return CounterRng(7, RngUse::test, static_cast<std::uint32_t>(step * 64 + rank)).normal(element);
}

// Writes a parameter's gradient as the backward pass does.
void write_gradient(Parameter& parameter, std::int64_t step, int rank,
                    const std::function<float(std::int64_t, int, std::size_t)>& value = gradient_value);

// The backward pass of a step: every parameter's gradient in the arena's order.
void backward(Exchange& exchange, ParameterArena& arena, std::int64_t step, int rank,
              const std::function<float(std::int64_t, int, std::size_t)>& value = gradient_value);

// The gradients of the golden traces, ten times as large: whole numbers, so that ties are exact.
inline float golden_gradient(std::int64_t step, int rank, std::size_t element) {
  return static_cast<float>((3 * step + 5 * rank + 7 * static_cast<std::int64_t>(element)) % 11 - 5);
}

// The averages of all groups, laid out as the arena.
std::vector<float> averages(Exchange& exchange, std::size_t size);
// The residual side of the arena, by groups.
std::vector<float> residuals(Exchange& exchange, ParameterArena& arena);

// A whole run: every step on every rank, the gradients from gradient_value() unless `gradient` says
// otherwise.
struct RunPlan {
  ExchangeOptions options;
  int ranks = 2;
  int steps = 1;
  double density = 1.0;
  bool overlaps = false;
  std::vector<float> weights;
  std::function<float(std::int64_t, int, std::size_t)> gradient = gradient_value;
  // In which order the parameters (positions in the arena) become ready; positions left out are not ready at
  // all.
  std::function<std::vector<std::size_t>(std::int64_t step, int rank)> order;
  std::function<bool(std::int64_t step, int rank)> loss_finite;
};

// A method that sends little of the tiny models too: low-rank ones approximate whatever it saves.
inline RunPlan plan_of(const std::string& name, const std::string& merge) {
  RunPlan plan;
  plan.options.compress.name = name;
  plan.options.compress.set("rank", 1);
  plan.options.compress.set("min_compression", 1.0);
  plan.options.merge = merge;
  plan.ranks = 4;
  plan.steps = 4;
  plan.density = 0.2;
  return plan;
}

struct RankRecord {
  std::vector<StepReport> results;
  std::vector<std::vector<float>> averages;   // by step; empty where the step was skipped
  std::vector<std::vector<float>> residuals;  // by step
  std::vector<std::string> calls;
};

// One rank of it, over any communicator; without calls.
RankRecord run_rank(Communicator& communicator, const RunPlan& plan);
// Every rank of it, over the test's own communicators or those of a backend.
std::vector<RankRecord> run(const RunPlan& plan, const std::string& backend = "");

// The first rank's part of `body`, with an exchange by these options.
inline void with_exchange(const ExchangeOptions& options,
                          const std::function<void(TestCommunicator&, TinyModel&, Exchange&)>& body) {
  run_ranks(1, false, [&](TestCommunicator& communicator) {
    TinyModel model;
    CollectiveQueue queue(communicator);
    Exchange exchange(*model.arena, queue, options);
    body(communicator, model, exchange);
  });
}

// Why these options are refused; "" where they are not.
inline std::string refusal(const ExchangeOptions& options) {
  return error_text<UserError>([&] { with_exchange(options, [](auto&, auto&, auto&) {}); });
}

// By step. The average is empty where the step was skipped; accumulated: u of the compressed part.
struct TrainedRank {
  std::vector<StepReport> results;
  std::vector<std::vector<float>> averages, residuals, accumulated, weights;
};

// Trains a fresh model with SGD on the gradients of `plan`. An empty backend stands for the test's own.
template <class Model>
std::vector<TrainedRank> train(const RunPlan& plan, const OptimizerOptions& sgd = {},
                               const std::string& backend = "threads") {
  std::vector<TrainedRank> records(static_cast<std::size_t>(plan.ranks));
  const auto body = [&](Communicator& communicator) {
    const int rank = communicator.rank();
    TrainedRank& record = records[static_cast<std::size_t>(rank)];
    Model model;
    CollectiveQueue queue(communicator);
    Exchange exchange(*model.arena, queue, plan.options);
    const auto optimizer = make_optimizer(sgd, *model.arena);
    std::vector<float> u(model.arena->size());
    exchange.observe([&](const Group& group, std::span<const float> values) {
      std::copy(values.begin(), values.end(), u.begin() + static_cast<std::ptrdiff_t>(group.begin));
    });
    for (std::int64_t step = 0; step < plan.steps; ++step) {
      exchange.begin_step({.step = step, .density = plan.density, .weights = plan.weights});
      backward(exchange, *model.arena, step, rank, plan.gradient);
      record.results.push_back(exchange.finish(!plan.loss_finite || plan.loss_finite(step, rank)));
      const bool committed = record.results.back().committed();
      record.averages.push_back(committed ? averages(exchange, model.arena->size()) : std::vector<float>());
      record.residuals.push_back(residuals(exchange, *model.arena));
      record.accumulated.push_back(u);
      if (committed)
        for (const Group& group : exchange.groups())
          optimizer->update(group.begin, exchange.averaged(group), {step, sgd.lr});
      const auto weights = model.arena->weights();
      record.weights.emplace_back(weights.begin(), weights.end());
    }
  };
  if (backend.empty())
    run_ranks(plan.ranks, plan.overlaps, body);
  else
    topknot::run_ranks(backend, plan.ranks, body);
  return records;
}

}  // namespace topknot::testing
