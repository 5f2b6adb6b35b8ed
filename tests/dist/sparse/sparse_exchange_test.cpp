// Sparse collectives and coded sums through the whole exchange: residuals, weights, skipped steps, refusals.
#include "dist/sparse/coded_sum.h"

#include <bit>

#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/support/same_bits.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

RunPlan plan_of(const std::string& collective, const std::string& name, int ranks) {
  RunPlan plan{.options = method(name, "size:100"), .ranks = ranks, .density = 0.1};
  plan.options.collective = collective;
  return plan;
}

constexpr std::size_t kCompressible = 61;  // of the tiny model

std::vector<float> values_of(int rank, std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i)
    values[i] = i % 5 == 0 ? 0.0f : gradient_value(i % 7 == 0 ? 1 : 0, rank, i) * (i % 11 == 0 ? 1e4f : 1.0f);
  return values;
}
std::vector<BFloat16> narrow(const std::vector<float>& values) {
  std::vector<BFloat16> half(values.size());
  to_bfloat16(values.data(), values.size(), half.data());
  return half;
}

bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}
bool same(BFloat16 a, BFloat16 b) {
  return same(to_float(a), to_float(b));
}

// Compares both sums of this rank's `data`.
template <class T>
CodedSum::Bytes check_sum(Communicator& communicator, CodedSum& coded, std::vector<T> data) {
  std::vector<T> plain = data;
  communicator.all_reduce(std::span<T>(plain), SumOrder::ranks);
  const CodedSum::Bytes bytes = coded.sum(communicator, std::span<T>(data));
  const bool all = std::equal(plain.begin(), plain.end(), data.begin(), [](T a, T b) { return same(a, b); });
  if (!all) throw std::runtime_error("the coded sum has other bits");
  return bytes;
}

}  // namespace

// Golden values: exact arithmetic, ties by lower index; the learning rate is a tenth of the trace's.
TEST_CASE("gtopk of four ranks trains as the golden trace") {
  RunPlan plan = plan_of("gtopk", "topk", 4);
  plan.steps = 3;
  plan.density = 0.25;
  plan.gradient = golden_gradient;
  OptimizerOptions sgd;
  sgd.lr = 0.01, sgd.momentum = 0;
  const auto records = run<FourWeights>(plan, "threads", sgd);
  for (const RankRecord& record : records) {
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

TEST_CASE("residuals and what was applied are what was accumulated, on bit-identical ranks") {
  for (const std::string collective : {"gtopk", "oktopk"})
    for (const std::string name : {"topk", "dgc", "regtopk", "gaussiank", "randk"})
      for (const int ranks : {2, 3, 5, 8}) {
        if (ranks != 3 && (name == "gaussiank" || name == "randk")) continue;
        RunPlan plan = plan_of(collective, name, ranks);
        plan.steps = 50;
        plan.options.compress.momentum = name == "dgc" ? 0.9 : 0.0;
        if (ranks == 3) plan.weights = {0.5f, 0.75f, 1.75f};
        plan.observed = true;
        const auto records = run(plan, "threads");
        INFO(collective << " of " << name << " with " << ranks << " ranks");
        const auto weight = [&](int rank) {
          return plan.weights.empty() ? 1.0 : static_cast<double>(plan.weights[rank]);
        };
        for (int step = 0; step < plan.steps; ++step)
          for (std::size_t i = 0; i < kCompressible; ++i) {
            // u is split between the average and the residuals.
            const double average = ranks * static_cast<double>(records[0].averages[step][i]);
            double u = 0, size = 0, left = 0;
            for (int rank = 0; rank < ranks; ++rank) {
              u += weight(rank) * static_cast<double>(records[rank].accumulated[step][i]);
              size += weight(rank) * std::fabs(static_cast<double>(records[rank].accumulated[step][i]));
              left += weight(rank) * static_cast<double>(records[rank].residuals[step][i]);
              if (name == "dgc") continue;  // whose momentum makes more of a gradient
              const float before = step > 0 ? records[rank].residuals[step - 1][i] : 0.0f;
              REQUIRE(records[rank].accumulated[step][i] == before + gradient_value(step, rank, i));
            }
            REQUIRE(std::fabs(left + average - u) <= 1e-6 * size);
          }
        for (const RankRecord& record : records) {
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
      const auto threads = run(plan, "threads"), gloo = run(plan, "gloo");
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
    const auto records = run(plan, "threads");
    // The residual holds -h of each rank, and the average is that of all h.
    for (int step = 0; step < plan.steps; ++step)
      for (std::size_t i = 0; i < kCompressible; ++i) {
        double estimates = 0;
        for (const RankRecord& record : records) estimates -= static_cast<double>(record.residuals[step][i]);
        CHECK(records[0].averages[step][i] == Approx(estimates / 3).margin(1e-5));
      }
  }
}

TEST_CASE("entries that a sum dropped keep their velocity under DGC") {
  // Rank 1's 1 at position 1 loses to rank 0's 10, so it goes on growing by its velocity: 1 + 0.9. Once it
  // has won, nothing of it is left.
  RunPlan plan = plan_of("gtopk", "dgc", 2);
  plan.density = 0.25, plan.steps = 3, plan.options.compress.momentum = 0.9;
  plan.gradient = [](std::int64_t step, int rank, std::size_t i) {
    return step > 0 || static_cast<int>(i) != rank ? 0.0f : rank == 0 ? 10.0f : 1.0f;
  };
  for (const RankRecord& record : run<FourWeights>(plan, "threads")) {
    CHECK(record.averages[0] == std::vector<float>{5, 0, 0, 0});
    CHECK(record.averages[1][0] == 0);
    CHECK(record.averages[1][1] == Approx(0.95));
    CHECK(record.averages[2] == std::vector<float>{0, 0, 0, 0});
  }
}

TEST_CASE("a sparse collective of a method that sends no entries, or rounds them, is one error") {
  const auto refused = [](const std::string& name, const std::string& values = "",
                          const std::string& aggregate = "auto", const std::string& collective = "gtopk") {
    ExchangeOptions options = method(name);
    options.compress.values = values, options.compress.aggregate = aggregate, options.collective = collective;
    return refusal(options);
  };
  const std::string key = "exchange.collective";
  for (const std::string name : {"powersgd", "dense"})
    CHECK(says(refused(name), {"compress.name: " + name, key}));
  CHECK(says(refused("topk", "fp16"), {"compress.values: fp16", key}));
  CHECK(says(refused("topk", "", "contributors"), {"compress.aggregate=ranks", key}));
  CHECK(says(refused("topk", "", "auto", "gtopp"), {"gtopk", key}));
  CHECK(refused("topk").empty());
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

TEST_CASE("a coded sum has the bits of a sum in rank order, on threads and gloo, for any length") {
  for (const char* backend : {"threads", "gloo"})
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (const std::size_t n : {0u, 1u, 50u, 5000u, 70000u}) {
        INFO(backend << ", " << ranks << " ranks, " << n << " values");
        CHECK_NOTHROW(topknot::run_ranks(backend, ranks, [&](Communicator& communicator) {
          CodedSum coded;
          std::vector<float> values = values_of(communicator.rank(), n);
          check_sum(communicator, coded, values);
          check_sum(communicator, coded, narrow(values));
          // What is not finite passes through, wherever it is; sums overflow as they do.
          if (n > 40) {
            values[3] = std::numeric_limits<float>::infinity();
            values[n - 1] = communicator.rank() == 0 ? std::nanf("") : 1.0f;
            values[n / 2] = -0.0f;
            values[20] = std::numeric_limits<float>::max();
          }
          check_sum(communicator, coded, narrow(values));
          check_sum(communicator, coded, values);
        }));
      }
}

TEST_CASE("a coded sum says what each rank sends and receives, and one rank sends nothing") {
  constexpr std::size_t n = 40000;
  for (const int ranks : {1, 3}) {
    std::vector<CodedSum::Bytes> all(ranks);
    topknot::run_ranks("threads", ranks, [&](Communicator& communicator) {
      CodedSum coded;
      std::vector<float> values(n);
      for (std::size_t i = 0; i < n; ++i) values[i] = gradient_value(0, communicator.rank(), i);
      all[communicator.rank()] = check_sum(communicator, coded, values);
    });
    std::uint64_t sent = 0, received = 0;
    for (const auto& [from, to] : all) {
      if (ranks > 1) CHECK((from > 0 && static_cast<double>(from) < n * 4 / 1.15));
      if (ranks > 1) CHECK(to > from);  // the pieces of the other ranks' sums
      sent += from, received += to;
    }
    if (ranks == 1) CHECK((sent == 0 && received == 0));
    // Each piece counts on both ends, and a gathered sum once as sent.
    if (ranks == 3)
      CHECK(static_cast<double>(received) / static_cast<double>(sent) == Approx(4.0 / 3).epsilon(0.05));
  }
}

TEST_CASE("methods whose messages are sums end with the same averages by coded sums") {
  for (const std::string name : {"dense", "powersgd", "acpsgd"})
    for (const int per_host : {0, 2})
      for (const std::string values : {"", "bf16"}) {
        if (name == "dense" ? per_host > 0 : !values.empty()) continue;
        INFO(name << " " << values << ", hosts of " << per_host);
        RunPlan plan = plan_of(name, "none");
        plan.options.compress.values = values;
        plan.options.ranks_per_host = per_host;
        plan.options.ordered_sum = true;
        for (const char* backend : {"threads", "gloo", "link"}) {
          plan.options.collective = "all_gather";
          const auto plain = run(plan, backend);
          plan.options.collective = "coded_sum";
          const auto coded = run(plan, backend);
          for (std::size_t rank = 0; rank < plain.size(); ++rank) {
            CHECK(coded[rank].averages == plain[rank].averages);
            CHECK(coded[rank].residuals == plain[rank].residuals);
            if (per_host == 0 || rank % 2 == 0)  // else it talks to its host alone
              CHECK(coded[rank].results[0].bytes_sent != plain[rank].results[0].bytes_sent);
          }
        }
      }
}

TEST_CASE("coded sums of a method that sends blocks are one error") {
  for (const std::string name : {"topk", "qsgd", "signsgd", "terngrad"}) {
    ExchangeOptions options = method(name);
    options.collective = "coded_sum";
    CHECK(says(refusal(options), {"compress.name: " + name, "exchange.collective", "all_gather"}));
  }
}
