// Checkpoints: what the exchange saves, with the arena's residuals, continues a run to the bit.
#include <cstring>

#include "nn/base/check.h"
#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

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
    exchange.begin_step(number, 0.2);
    model.arena->clear_gradients();
    for (Parameter* parameter : model.arena->parameters()) {
      write_gradient(*parameter, number, rank);
      exchange.ready(*parameter);
    }
    if (!exchange.finish(true).committed) throw Error("a finite step was skipped");
    return averages(exchange, model.arena->size());
  }
};

}  // namespace

TEST_CASE("state and residuals saved after some steps continue a run to the bit", "[exchange]") {
  for (const std::string& method : compressors().names()) {
    ExchangeOptions options;
    options.compress.name = method;
    options.compress.momentum = 0.9;
    options.compress.set("threshold", 0.7);
    options.compress.set("min_compression", 1);
    options.merge = "size:160";
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
        if (a != b) throw Error(method + ": step " + std::to_string(step) + " differs after a restart");
      }
    });
  }
}

TEST_CASE("state of another plan, or damaged, is refused", "[exchange]") {
  ExchangeOptions options;
  options.compress.name = "topk";
  testing::run_ranks(1, false, [&](Communicator& communicator) {
    options.merge = "all";
    Run all(communicator, options);
    options.merge = "none";
    Run none(communicator, options);
    CHECK_THROWS_AS(none.exchange.load_state(all.exchange.state()), Error);
    auto state = all.exchange.state();
    state.resize(state.size() - 1);
    CHECK_THROWS_AS(all.exchange.load_state(state), Error);
    state = all.exchange.state();
    state.push_back(std::byte{7});
    CHECK_THROWS_AS(all.exchange.load_state(state), Error);
  });
}
