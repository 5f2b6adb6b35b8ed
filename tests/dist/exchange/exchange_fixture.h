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

inline void ones(std::span<float> values, const CounterRng&) {
  std::ranges::fill(values, 1.0f);
}

// Registration order conv, bias, middle, unused, head; so in the arena: conv, head, unused, middle | bias.
struct TinyModel {
  ParameterStore store;
  ParameterArena* arena;
  TinyModel() {
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
    store.add("w", {4}, ones);
    arena = &store.build([](const Parameter&) { return true; }, 1);
  }
};

// A rank's gradient in a step at a place in the arena; in most tests random.
using GradientValue = std::function<float(std::int64_t step, int rank, std::size_t element)>;
inline float gradient_value(std::int64_t step, int rank, std::size_t element) {
  return CounterRng(7, RngUse::test, static_cast<std::uint32_t>(step * 64 + rank)).normal(element);
}

// Writes a parameter's gradient as the backward pass does.
void write_gradient(Parameter& parameter, std::int64_t step, int rank,
                    const GradientValue& value = gradient_value);

// The backward pass of a step, in the arena's order or in this one of its positions, which may lack some.
void backward(Exchange& exchange, ParameterArena& arena, std::int64_t step, int rank,
              const GradientValue& value = gradient_value, const std::vector<std::size_t>& order = {});

// The gradients of the golden traces, ten times as large: whole numbers, so that ties are exact.
inline float golden_gradient(std::int64_t step, int rank, std::size_t element) {
  return static_cast<float>((3 * step + 5 * rank + 7 * static_cast<std::int64_t>(element)) % 11 - 5);
}

// The averages of all groups, laid out as the arena.
std::vector<float> averages(Exchange& exchange, std::size_t size);

inline ExchangeOptions method(const std::string& name, const std::string& merge = "all") {
  ExchangeOptions options;
  options.compress.name = name, options.merge = merge;
  return options;
}

// A whole run: every step on every rank.
struct RunPlan {
  ExchangeOptions options = {};
  int ranks = 2;
  int steps = 1;
  double density = 1.0;
  bool overlaps = false;
  std::vector<float> weights = {};
  GradientValue gradient = gradient_value;
  // In which order the parameters (positions in the arena) become ready; it may lack some.
  std::function<std::vector<std::size_t>(std::int64_t step, int rank)> order = {};
  std::function<bool(std::int64_t step, int rank)> loss_finite = {};
  bool observed = false;
};

// A method that sends little of the tiny models too: low-rank ones approximate whatever it saves.
inline RunPlan plan_of(const std::string& name, const std::string& merge) {
  RunPlan plan{.options = method(name, merge), .ranks = 4, .steps = 4, .density = 0.2};
  plan.options.compress.set("rank", 1);
  plan.options.compress.set("min_compression", 1.0);
  return plan;
}

// By step.
struct RankRecord {
  std::vector<StepReport> results;
  std::vector<std::vector<float>> averages;  // empty where the step was skipped
  std::vector<std::vector<float>> residuals, weights;
  std::vector<std::vector<float>> accumulated;  // u of the compressed part, if it is observed
  std::vector<std::string> calls;               // of the test's own communicators
};

RankRecord run_rank(Communicator& communicator, const RunPlan& plan, ParameterArena& arena,
                    const OptimizerOptions& sgd);

// Trains a fresh model on every rank, over the test's own communicators or those of a backend.
template <class Model = TinyModel>
std::vector<RankRecord> run(const RunPlan& plan, const std::string& backend = "",
                            const OptimizerOptions& sgd = {}) {
  std::vector<RankRecord> records(plan.ranks);
  const auto body = [&](Communicator& communicator) {
    Model model;
    records[communicator.rank()] = run_rank(communicator, plan, *model.arena, sgd);
  };
  if (backend.empty())
    run_ranks(plan.ranks, plan.overlaps, [&](TestCommunicator& communicator) {
      body(communicator);
      records[communicator.rank()].calls = communicator.calls;
    });
  else
    topknot::run_ranks(backend, plan.ranks, body);
  return records;
}

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

}  // namespace topknot::testing
