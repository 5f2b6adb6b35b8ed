#include "dist/exchange/exchange.h"

#include "compress/compressor.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/clock.h"
#include "nn/core/threads.h"
#include "tests/compress/every_method.h"
#include "tests/dist/exchange/exchange_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr std::size_t kSize = 68, kCompressible = 61;
constexpr const char* kMerges[] = {"none", "all", "size:100"};

}  // namespace

TEST_CASE("a dense average is the sum in rank order over the number of ranks") {
  for (const int ranks : {1, 2, 4, 8})
    for (const std::string merge : kMerges) {
      RunPlan plan{.options = method("dense", merge), .ranks = ranks, .steps = 2, .overlaps = ranks == 4};
      plan.options.ordered_sum = ranks != 2;
      const auto records = run(plan);
      for (int step = 0; step < plan.steps; ++step)
        for (const RankRecord& record : records) {
          REQUIRE(record.results[step].committed());
          for (std::size_t i = 0; i < kSize; ++i) {
            float sum = gradient_value(step, 0, i);
            for (int rank = 1; rank < ranks; ++rank) sum = sum + gradient_value(step, rank, i);
            REQUIRE(record.averages[step][i] == sum / static_cast<float>(ranks));
          }
        }
    }
}

TEST_CASE("dense takes the library's sum unless told otherwise, a compressed method sums in rank order") {
  using Calls = std::vector<std::string>;
  const auto calls = [](const std::string& name, bool ordered, const std::string& values = "") {
    RunPlan plan{.options = method(name)};
    plan.options.ordered_sum = ordered, plan.options.compress.values = values;
    return run(plan)[1].calls;
  };
  CHECK(calls("dense", false) == Calls{"sum 68", "gather"});
  CHECK(calls("dense", true) == Calls{"ordered sum 68", "gather"});
  CHECK(calls("dense", true, "bf16") == Calls{"ordered sum of bfloat16 68", "gather"});
  CHECK(calls("dense", false, "bf16") == Calls{"sum of bfloat16 68", "gather"});
  CHECK(calls("test_rotate", false) == Calls{"gather", "ordered sum 7", "gather"});
}

TEST_CASE("a compressed average and its residual follow a reference in double, with uneven weights") {
  for (const int ranks : {1, 2, 4, 8})
    for (const std::string merge : kMerges) {
      RunPlan plan{
          .options = method("test_rotate", merge), .ranks = ranks, .steps = 5, .overlaps = merge == "none"};
      for (int rank = 0; rank < ranks; ++rank)
        plan.weights.push_back(ranks == 1 ? 1.0f
                                          : 0.5f + static_cast<float>(rank) / static_cast<float>(ranks - 1));
      const auto records = run(plan);
      TinyModel model;
      const auto groups = cut_groups(*model.arena, true, "group", merge);
      std::vector<std::vector<double>> residual(ranks, std::vector<double>(kSize, 0.0));
      for (int step = 0; step < plan.steps; ++step)
        for (const Group& group : groups)
          for (std::size_t i = group.begin; i < group.end; ++i) {
            const bool sent =
                !group.compressed || (i - group.begin + static_cast<std::size_t>(step)) % 3 == 0;
            double sum = 0;
            for (int rank = 0; rank < ranks; ++rank) {
              double& r = residual[rank][i];
              r += gradient_value(step, rank, i);
              if (!sent) continue;
              sum += static_cast<double>(plan.weights[rank]) * r;
              r = 0;
            }
            for (int rank = 0; rank < ranks; ++rank) {
              REQUIRE(records[rank].averages[step][i] == records[0].averages[step][i]);
              REQUIRE(records[rank].averages[step][i] == Approx(sum / ranks).margin(1e-5));
              if (group.compressed)
                REQUIRE(records[rank].residuals[step][i] == Approx(residual[rank][i]).margin(1e-5));
            }
          }
    }
}

TEST_CASE("groups are sent in arena order, whatever the order in which parameters become ready") {
  for (const std::string merge : kMerges) {
    RunPlan plan{.options = method("test_rotate", merge), .ranks = 4, .steps = 6};
    const auto in_order = run(plan);
    plan.order = [](std::int64_t step, int rank) {
      std::vector<std::size_t> order{0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step * 4 + rank)));
      return order;
    };
    for (const bool overlaps : {false, true}) {
      plan.overlaps = overlaps;
      const auto shuffled = run(plan);
      for (int rank = 0; rank < plan.ranks; ++rank) {
        CHECK(shuffled[rank].calls == in_order[rank].calls);
        CHECK(shuffled[rank].averages == in_order[rank].averages);
        CHECK(shuffled[rank].residuals == in_order[rank].residuals);
      }
    }
  }
}

TEST_CASE("a group completed early is sent as soon as its predecessors are, before the backward pass ends") {
  with_exchange(method("test_rotate", "none"), [](TestCommunicator& c, TinyModel& model, Exchange& exchange) {
    std::vector<std::size_t> calls_after;
    exchange.begin_step({.step = 0});
    for (const std::size_t position : {1, 2, 0, 4, 3}) {
      write_gradient(*model.arena->parameters()[position], 0, 0);
      exchange.ready(*model.arena->parameters()[position]);
      calls_after.push_back(c.calls.size());
    }
    exchange.finish(true);
    calls_after.push_back(c.calls.size());
    CHECK(calls_after == std::vector<std::size_t>{0, 0, 3, 3, 5, 6});  // the last is the agreement
  });
}

TEST_CASE("a parameter that no backward pass reached counts as zero") {
  for (const std::string name : {"dense", "test_rotate"}) {
    RunPlan plan{.options = method(name, "none"), .steps = 3};
    // On rank 1 the parameter at 45..51 takes no part in steps 1 and 2, and the memory still holds older
    // gradients.
    plan.order = [](std::int64_t step, int rank) {
      return rank == 1 && step > 0 ? std::vector<std::size_t>{4, 0, 3, 1}
                                   : std::vector<std::size_t>{0, 1, 2, 3, 4};
    };
    const auto absent = run(plan);
    plan.order = {};
    plan.gradient = [](std::int64_t step, int rank, std::size_t i) {
      return rank == 1 && step > 0 && i >= 45 && i < 51 ? 0.0f : gradient_value(step, rank, i);
    };
    const auto zero = run(plan);
    for (int rank : {0, 1}) CHECK(absent[rank].averages == zero[rank].averages);
  }
}

TEST_CASE("a second round follows in the same order, and its average reaches all ranks") {
  for (const bool overlaps : {false, true}) {
    const RunPlan plan{.options = method("test_common_scale", "none"),
                       .ranks = 4,
                       .steps = 3,
                       .overlaps = overlaps,
                       .weights = {0.5f, 1.0f, 1.0f, 1.5f}};
    const auto records = run(plan);
    const std::vector<std::string> step_calls{
        "gather", "gather",         "gather",         "gather",        "ordered sum 7",
        "gather", "ordered sum 12", "ordered sum 33", "ordered sum 6", "ordered sum 10"};
    std::vector<std::string> calls;
    for (int step = 0; step < plan.steps; ++step)
      calls.insert(calls.end(), step_calls.begin(), step_calls.end());
    for (const RankRecord& record : records) {
      CHECK(record.calls == calls);
      CHECK(record.averages == records[0].averages);
    }
    // What was applied plus what is kept is what came in.
    for (std::size_t i = 0; i < kCompressible; ++i) {
      double in = 0, out = 0;
      for (int step = 0; step < plan.steps; ++step) {
        out += records[0].averages[step][i] * plan.ranks;
        for (int rank = 0; rank < plan.ranks; ++rank)
          in += plan.weights[rank] * gradient_value(step, rank, i);
      }
      for (int rank = 0; rank < plan.ranks; ++rank)
        out += plan.weights[rank] * records[rank].residuals.back()[i];
      CHECK(out == Approx(in).margin(1e-4));
    }
  }
}

TEST_CASE("bytes, entries and the plan's bytes are those of the messages") {
  const StepReport report = run({.options = method("test_rotate")})[1].results[0];
  CHECK(report.status.selected == 21);  // of 61, every third from 0
  CHECK(report.bytes_sent == (1 + 21) * 4 + 7 * 4);
  CHECK(report.bytes_received == report.bytes_sent);  // the other rank's block, and the sum
  CHECK((report.times.encode_s > 0 && report.times.communicate_s > 0 && report.times.decode_s > 0 &&
         report.times.exposed_s > 0));
}

TEST_CASE("bytes are those of all rounds, and of the other ranks' blocks of any length") {
  RunPlan plan = plan_of("powersgd", "none");
  // Of matrices of 3 x 4, 11 x 3, 2 x 3 and 5 x 2 a row and a column, each in a round of its own, and 7 biases.
  for (const RankRecord& record : run(plan)) CHECK(record.results[1].bytes_sent == 4 * (7 + 14 + 5 + 7 + 7));
  plan.options = method("threshold", "none");
  plan.options.compress.set("threshold", 1.0);
  plan.ranks = 2;
  const auto records = run(plan);
  const StepReport &first = records[0].results[0], &second = records[1].results[0];
  CHECK(first.bytes_sent != second.bytes_sent);
  CHECK((first.bytes_received == second.bytes_sent && second.bytes_received == first.bytes_sent));
}

TEST_CASE("entries that a capacity keeps back are counted over all groups") {
  RunPlan plan{.options = method("threshold", "none"), .density = 0.1};
  plan.options.compress.set("threshold", 1e-6);
  plan.options.compress.capacity = 1;
  const StepReport report = run(plan)[1].results[0];
  CHECK(report.status.selected == 6);        // of 33, 6, 10 and 12 entries: 3, 1, 1 and 1
  CHECK(report.status.over_capacity == 55);  // all the others, which exceed the threshold
}

TEST_CASE("dense groups in 16 bits are sent whole, whatever the density") {
  RunPlan plan{.options = method("topk"), .density = 0.1};
  plan.options.dense_values = "bf16";
  const auto average = run(plan)[0].averages[0];
  for (std::size_t i = kCompressible; i < kSize; ++i)
    CHECK(average[i] == Approx((gradient_value(0, 0, i) + gradient_value(0, 1, i)) / 2).margin(0.02));
  CHECK(run(plan)[0].results[0].bytes_sent ==
        planned_bytes(*TinyModel().arena, plan.options, plan.ranks, plan.density));
}

TEST_CASE("dense in few bits sends each rank its piece, and the average in pieces") {
  for (const int ranks : {1, 3}) {
    RunPlan plan{.options = method("dense"), .ranks = ranks, .steps = 2};
    plan.options.compress.values = "int8";
    const auto records = run(plan);
    for (const auto& record : records) {
      CHECK(record.results[0].bytes_sent == planned_bytes(*TinyModel().arena, plan.options, ranks, 1.0));
      for (std::size_t i = 0; i < kSize; ++i) {
        float exact = 0;
        for (int r = 0; r < ranks; ++r) exact += gradient_value(0, r, i) / static_cast<float>(ranks);
        CHECK(record.averages[0][i] == Approx(exact).margin(0.03));
      }
      for (int step = 0; step < 2; ++step) CHECK(same_bits(record.averages[step], records[0].averages[step]));
    }
    if (ranks == 1) continue;
    // Pieces leave one by one, and the average's once, as gathered blocks do; two of each arrive.
    const std::size_t plain = 4 * (kSize - kCompressible);
    CHECK(3 * (records[0].results[1].bytes_received - plain) ==
          4 * (records[0].results[1].bytes_sent - plain));
  }
}

TEST_CASE("spans say in which round a group was decoded") {
  with_exchange(method("test_common_scale"), [](TestCommunicator&, TinyModel& model, Exchange& exchange) {
    std::vector<int> rounds;
    exchange.begin_step({.step = 0});
    backward(exchange, *model.arena, 0, 0);
    exchange.finish(true);
    for (const ExchangeSpan& span : exchange.spans())
      if (span.kind == ExchangeSpan::Kind::decode && span.group == 0) rounds.push_back(span.round);
    CHECK(rounds == std::vector<int>{0, 1});
  });
}

TEST_CASE("what topk and dense send is what the plan promised") {
  for (const std::string name : {"dense", "topk"})
    for (const std::string scope : {"group", "tensor"})
      for (const std::string merge : kMerges)
        for (const double density : {0.01, 0.1, 1.0}) {
          RunPlan plan{.options = method(name, merge), .density = density};
          plan.options.scope = scope;
          const std::uint64_t planned = planned_bytes(*TinyModel().arena, plan.options, 1, density);
          const StepReport report = run(plan)[0].results[0];
          CHECK(report.bytes_sent == planned);
          if (name == "dense") CHECK(planned == 4 * kSize);
          // Of 33, 6, 10 and 12 entries: 3, 1, 1 and 1 where each tensor selects alone.
          if (name == "topk" && density == 0.1 && scope == "tensor") CHECK(report.status.selected == 6);
          if (name == "topk" && density == 0.01)
            CHECK(report.status.selected == (scope == "tensor" || merge == "none" ? 4u
                                             : merge == "all"                     ? 1u
                                                                                  : 3u));
        }
}

// Computed in exact arithmetic: d = 4, k = 1, two ranks, lr 0.1, here a tenth of it.
TEST_CASE("topk with error feedback and momentum follows the golden trace") {
  OptimizerOptions sgd;
  sgd.lr = 0.01, sgd.momentum = 0.9;
  const double expected[4][4] = {
      {1.025, 1.02, 1, 1}, {1.0325, 1.003, 1, 1}, {1.03925, 1.0027, 1, 0.97}, {1.080325, 1.00243, 1, 0.918}};
  for (const bool overlaps : {false, true}) {
    const auto records = run<FourWeights>({.options = method("topk"),
                                           .steps = 4,
                                           .density = 0.25,
                                           .overlaps = overlaps,
                                           .gradient = golden_gradient},
                                          "", sgd);
    for (const RankRecord& record : records)
      for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
          CHECK(record.weights[step][i] == Approx(expected[step][i]).epsilon(0).margin(5e-7));
    CHECK(same_bits(records[0].weights[3], records[1].weights[3]));
    CHECK(records[0].residuals.back() == std::vector<float>{3, 0, -1, 0});
    CHECK(records[1].residuals.back() == std::vector<float>{0, 6, -3, -3});
  }
}

TEST_CASE("topk of density 1 trains as dense does: the same bits with one rank, else within rounding") {
  OptimizerOptions sgd;
  sgd.momentum = 0.9, sgd.weight_decay = 1e-3;
  for (const int ranks : {1, 3, 4}) {
    const auto dense = run({.options = method("dense"), .ranks = ranks, .steps = 6}, "", sgd);
    for (const std::string merge : {"none", "all"})
      for (const std::string scope : {"group", "tensor"}) {
        RunPlan plan{.options = method("topk", merge), .ranks = ranks, .steps = 6};
        plan.options.scope = scope;
        const auto topk = run(plan, "", sgd);
        for (int rank = 0; rank < ranks; ++rank) {
          CHECK(same_bits(topk[rank].weights.back(), topk[0].weights.back()));
          if (ranks == 1) CHECK(same_bits(topk[rank].weights.back(), dense[rank].weights.back()));
          for (std::size_t i = 0; i < dense[rank].weights.back().size(); ++i)
            REQUIRE(topk[rank].weights.back()[i] == Approx(dense[rank].weights.back()[i]).margin(1e-5));
        }
      }
  }
}

TEST_CASE("every compressor leaves the same weights on all ranks and on every backend") {
  OptimizerOptions sgd;
  sgd.momentum = 0.9;
  for (const std::string& name : compressors().names())
    for (const int ranks : {1, 2, 4, 8}) {
      RunPlan plan{.options = method(name, "size:100"), .ranks = ranks, .steps = 10, .density = 0.1};
      plan.options.compress.momentum = sgd.momentum;
      plan.options.compress.set("threshold", 0.5);
      plan.options.ordered_sum = true;
      const std::vector<float> expected = run(plan, "", sgd)[0].weights.back();
      for (const std::string backend : {"threads", "gloo"})
        for (const RankRecord& record : run(plan, backend, sgd)) {
          INFO(name << " over " << backend << " with " << ranks << " ranks");
          CHECK(same_bits(record.weights.back(), expected));
        }
    }
}

// With more threads than cores, libgomp's waiting threads sleep at once in every team: nn/core/threads.h.
TEST_CASE("only compute threads have teams, with any method and collective") {
  using namespace std::chrono_literals;
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  std::vector<ExchangeOptions> cases;
  for (const std::string& name : methods()) {
    cases.push_back(method(name));
    cases.back().compress = options_for(name);
  }
  for (const std::string& name : collectives().names()) {
    cases.push_back(method(name == "coded_sum" ? "dense" : "topk"));
    cases.back().collective = name;
  }
  constexpr int kRanks = 2, kThreads = 2;
  std::this_thread::sleep_for(200ms);  // for threads of earlier tests to end
  const std::ptrdiff_t expected = threads() + kRanks * (kThreads + 1);
  for (const ExchangeOptions& options : cases) {
    CAPTURE(options.compress.name, options.collective);
    std::ptrdiff_t during = 0;
    topknot::run_ranks("link", kRanks, [&](Communicator& communicator) {
      set_team_size(kThreads);
      ParameterStore store;
      store.add("w", {512, 512}, ones);  // enough for loops on two threads
      ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
      CollectiveQueue queue(communicator);
      Exchange exchange(arena, queue, options);
      for (std::int64_t step = 0; step < 10; ++step) {
        exchange.begin_step({.step = step, .density = 0.01});
        backward(exchange, arena, step, communicator.rank());
        exchange.finish(true);
      }
      queue.run([&](Communicator& c) {
        c.barrier();
        // Teams of threads that have ended end a little later.
        for (Patience waited; c.rank() == 0 && (during = threads()) != expected && waited.passed() < 10;)
          std::this_thread::sleep_for(10ms);
        c.barrier();
      });
    });
    CHECK(during == expected);
  }
}
