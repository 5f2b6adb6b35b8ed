// exchange.ranks_per_host: dense inside a host, compressed across.

#include "dist/sparse/hierarchical.h"

#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "tests/dist/exchange/exchange_fixture.h"

namespace topknot {
namespace {

using testing::RankRecord;
using testing::run;
using testing::RunPlan;
using testing::TinyModel;

// Multiples of 12: their means over up to four ranks, weighted by halves, are whole numbers.
float whole_value(std::int64_t step, int rank, std::size_t element) {
  return 12.0f * static_cast<float>(static_cast<int>((step * 7 + rank * 13 + element * 5) % 31) - 15);
}

struct Cluster {
  int hosts, ranks_per_host;
};
const std::vector<Cluster> shapes = {{2, 2}, {2, 3}, {3, 2}, {1, 3}};

RunPlan plan_of(const Cluster& shape, const std::string& name, const std::string& merge) {
  RunPlan plan{.options = testing::method(name, merge),
               .ranks = shape.hosts * shape.ranks_per_host,
               .steps = 4,
               .density = 0.2};
  plan.options.ranks_per_host = shape.ranks_per_host;
  return plan;
}

// What it must equal: as many ranks as hosts, each with the mean gradient of a host's ranks.
RunPlan flat_plan_of(const Cluster& shape, const RunPlan& plan) {
  RunPlan flat = plan;
  flat.options.ranks_per_host = 0;
  flat.ranks = shape.hosts;
  const int per_host = shape.ranks_per_host;
  std::vector<float> weights = plan.weights;
  if (weights.empty()) weights.assign(static_cast<std::size_t>(plan.ranks), 1.0f);
  flat.weights.assign(static_cast<std::size_t>(shape.hosts), 0.0f);
  for (int r = 0; r < plan.ranks; ++r)
    flat.weights[r / per_host] += weights[r] / static_cast<float>(per_host);
  flat.gradient = [=](std::int64_t step, int host, std::size_t element) {
    double sum = 0, total = 0;
    for (int r = host * per_host; r < (host + 1) * per_host; ++r) {
      sum += static_cast<double>(weights[r]) * plan.gradient(step, r, element);
      total += weights[r];
    }
    return static_cast<float>(sum / total);
  };
  return flat;
}

}  // namespace

TEST_CASE("hosts of ranks make every kind of call as one rank a host would") {
  for (const auto& backend : kBackends)
    check_ranks(backend, 6, {}, [](Communicator& flat, const Expect& expect) {
      const int me = flat.rank(), host = me / 2;
      const auto inside = flat.split(host);
      const auto across = flat.split(me % 2);
      HierarchicalCommunicator c(*inside, me % 2 == 0 ? across.get() : nullptr, host, 3);
      expect(c.rank() == host && c.size() == 3, "rank and size");
      const auto block = [](int from, int to, int round) {
        const std::size_t lengths[] = {0, 3, 5000};
        return std::vector<std::byte>(lengths[(from + to + round) % 3],
                                      static_cast<std::byte>(from * 16 + to));
      };
      for (int round = 0; round < 3; ++round) {
        Blocks all, mine, theirs, gathered, sent;
        for (int h = 0; h < 3; ++h) {
          mine.push_back(block(host, h, round));
          gathered.push_back(block(h, 0, round)), sent.push_back(block(h, host, round));
        }
        c.all_gather(block(host, 0, round), all);
        c.all_to_all(mine, theirs);
        expect(all == gathered, "all_gather");
        expect(theirs == sent, "all_to_all");
        std::vector<std::byte> one;
        c.send_receive((host + 1) % 3, block(host, 7, round), (host + 2) % 3, one);
        expect(one == block((host + 2) % 3, 7, round), "a ring");
        c.send_receive(host == 0 ? 2 : -1, block(host, 9, round), host == 2 ? 0 : -1, one);
        expect(one == (host == 2 ? block(0, 9, round) : std::vector<std::byte>{}), "one message");
        std::vector<float> sum(9000, static_cast<float>(1 << host));
        c.all_reduce(std::span<float>(sum), SumOrder::ranks);
        expect(sum == std::vector(9000, 7.0f), "the sum of floats");
        std::vector<double> doubles(3, 0.5 * (host + 1));
        sum_doubles(c, doubles);
        expect(doubles == std::vector(3, 3.0), "the sum of doubles");
        auto bytes = block(host, 1, 1 - host + 3);
        c.broadcast(bytes, round);
        expect(bytes == block(round, 1, 1 - round + 3), "broadcast");
        c.barrier();
      }
    });
}

TEST_CASE("a hierarchy that gives up ends the other hosts' calls with its reason") {
  const auto errors = errors_of_ranks("threads", 4, {20, false}, [&](Communicator& flat) {
    const int me = flat.rank(), host = me / 2;
    const auto inside = flat.split(host);
    const auto across = flat.split(me % 2 == 0 ? 0 : me);
    HierarchicalCommunicator c(*inside, me % 2 == 0 ? across.get() : nullptr, host, 2);
    if (me == 0) c.abort("the disk is full");
    if (host == 1) c.barrier();
  });
  CHECK(says(errors[2], {"the disk is full"}));
}

TEST_CASE("a hierarchy steps as so many ranks as hosts would, each with its host's mean gradient") {
  for (const auto& shape : shapes)
    for (const std::string method : {"topk", "test_rotate", "test_common_scale", "regtopk"})
      for (const std::string merge : {"none", "all"}) {
        INFO(shape.hosts << " x " << shape.ranks_per_host << ", " << method << ", merge " << merge);
        RunPlan plan = plan_of(shape, method, merge);
        plan.gradient = whole_value;
        const auto records = run(plan, "threads");
        const auto flat = run(flat_plan_of(shape, plan), "threads");
        for (int r = 0; r < plan.ranks; ++r) {
          const RankRecord& host = flat[r / shape.ranks_per_host];
          CHECK(records[r].averages == host.averages);
          CHECK(records[r].residuals == host.residuals);
          const bool leads = r % shape.ranks_per_host == 0;
          CHECK(records[r].results[2].bytes_sent == (leads ? host.results[2].bytes_sent : 0));
          CHECK(records[r].results[2].bytes_received == (leads ? host.results[2].bytes_received : 0));
        }
      }
}

TEST_CASE("the ranks of a host count with their weights, and a host with those of its ranks") {
  for (const std::string method : {"topk", "test_rotate"}) {
    const Cluster shape{2, 2};
    RunPlan plan = plan_of(shape, method, "none");
    plan.gradient = whole_value;
    plan.weights = {0.5f, 1.5f, 1.75f, 0.25f};
    const auto records = run(plan, "threads");
    const auto flat = run(flat_plan_of(shape, plan), "threads");
    for (int r = 0; r < 4; ++r) CHECK(records[r].averages == flat[r / 2].averages);

    // With everything sent, the average is sum(weight * gradient) / ranks, whatever the hosts.
    plan.density = 1.0;
    if (method != "topk") continue;
    for (const auto& weights : {std::vector<float>{1.5f, 1.5f, 0.5f, 0.5f}, {0.25f, 0.25f, 1.75f, 1.75f}}) {
      plan.weights = weights;
      const auto all = run(plan, "threads");
      std::vector<float> expected(all[0].averages[3].size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        for (int r = 0; r < 4; ++r) expected[i] += plan.weights[r] * whole_value(3, r, i);
        expected[i] /= 4;
      }
      CHECK(all[0].averages[3] == expected);
    }
  }
}

TEST_CASE("a hierarchy ends with the same bits on all ranks and both backends, whatever the arrival") {
  for (const auto& shape : shapes)
    for (const std::string method : {"topk", "dgc", "powersgd", "qsgd"}) {
      if (shape.ranks_per_host == 3 && method != "powersgd") continue;
      INFO(shape.hosts << " x " << shape.ranks_per_host << ", " << method);
      RunPlan plan = plan_of(shape, method, "none");
      plan.options.dense_values = method == "dgc" ? "bf16" : "fp32";
      const auto threads = run(plan, "threads");
      plan.order = [](std::int64_t step, int rank) {
        std::vector<std::size_t> order{0, 1, 2, 3, 4};
        std::rotate(order.begin(), order.begin() + (step + rank) % 5, order.end());
        if (rank % 2 == 1) std::reverse(order.begin(), order.end());
        return order;
      };
      const auto gloo = run(plan, "gloo");
      for (int r = 0; r < plan.ranks; ++r) {
        CHECK(threads[r].averages == threads[0].averages);
        CHECK(gloo[r].averages == threads[0].averages);
        CHECK(gloo[r].residuals == threads[r / shape.ranks_per_host * shape.ranks_per_host].residuals);
      }
      CHECK(threads[0].averages[3] != threads[0].averages[2]);
    }
}

TEST_CASE("sparse collectives run between hosts") {
  for (const std::string collective : {"gtopk", "oktopk"}) {
    for (const auto& shape : shapes) {
      INFO(shape.hosts << " x " << shape.ranks_per_host << ", " << collective);
      RunPlan plan = plan_of(shape, "topk", "none");
      plan.gradient = whole_value;
      plan.options.collective = collective;
      const auto flat = run(flat_plan_of(shape, plan), "threads");
      for (const auto& backend : kBackends) {
        if (backend == "gloo" && plan.ranks != 4) continue;
        const auto records = run(plan, backend);
        for (int r = 0; r < plan.ranks; ++r) {
          CHECK(records[r].averages == flat[r / shape.ranks_per_host].averages);
          CHECK(records[r].residuals == flat[r / shape.ranks_per_host].residuals);
        }
      }
    }
  }
}

// Where the parts of the tiny model's compressed groups lie in the arena, by the index of the rank in its host. With 2
// ranks the group of 33 elements is cut into 32 and 1, those of 12 and less into all and none.
std::vector<std::vector<ElementRange>> parts_of_groups(int ranks_per_host, const std::string& merge) {
  const std::vector<ElementRange> groups =
      merge == "all" ? std::vector<ElementRange>{{0, 61}}
                     : std::vector<ElementRange>{{0, 12}, {12, 45}, {45, 51}, {51, 61}};
  std::vector<std::vector<ElementRange>> parts(ranks_per_host);
  for (int index = 0; index < ranks_per_host; ++index)
    for (const ElementRange& group : groups) {
      const ElementRange part = slice_of(group.size(), ranks_per_host, index);
      parts[index].push_back({group.begin + part.begin, group.begin + part.end});
    }
  return parts;
}

TEST_CASE("in parts, each rank sends the largest entries of its part of the mean, and all get the whole") {
  for (const auto& shape : {Cluster{2, 2}, Cluster{3, 2}, Cluster{1, 3}})
    for (const std::string merge : {"none", "all"}) {
      INFO(shape.hosts << " x " << shape.ranks_per_host << ", merge " << merge);
      const int per_host = shape.ranks_per_host;
      RunPlan plan = plan_of(shape, "topk", merge);
      plan.options.hierarchy = "parts";
      const auto records = run(plan, "threads");
      const auto parts = parts_of_groups(per_host, merge);
      std::vector<std::vector<float>> memory(shape.hosts, std::vector<float>(61));
      for (int step = 0; step < plan.steps; ++step) {
        std::vector<float> average(61);
        for (int h = 0; h < shape.hosts; ++h) {
          std::vector<float>& u = memory[h];
          for (std::size_t i = 0; i < u.size(); ++i) {
            float sum = 0;
            for (int r = 0; r < per_host; ++r) sum += testing::gradient_value(step, h * per_host + r, i);
            u[i] += sum / static_cast<float>(per_host);
          }
          for (const auto& of_rank : parts)
            for (const ElementRange& part : of_rank) {
              std::vector<std::size_t> order(part.size());
              std::iota(order.begin(), order.end(), part.begin);
              std::sort(order.begin(), order.end(),
                        [&](std::size_t a, std::size_t b) { return std::abs(u[a]) > std::abs(u[b]); });
              if (!order.empty()) order.resize(target_count(plan.density, part.size()));
              for (const std::size_t i : order) average[i] += std::exchange(u[i], 0.0f);
            }
        }
        for (float& value : average) value *= 1.0f / static_cast<float>(shape.hosts);
        for (int r = 0; r < plan.ranks; ++r) {
          CHECK(std::equal(average.begin(), average.end(), records[r].averages[step].begin()));
          CHECK(records[r].averages[step] == records[0].averages[step]);  // with the dense group
          // What is left of its part, and nothing else.
          std::vector<float> residual(records[r].residuals[step].size());
          for (const ElementRange& part : parts[r % per_host])
            std::copy(memory[r / per_host].begin() + part.begin, memory[r / per_host].begin() + part.end,
                      residual.begin() + part.begin);
          CHECK(records[r].residuals[step] == residual);
        }
      }
    }
}

TEST_CASE("in parts, a host's ranks send together what is planned, and report the host's entries") {
  RunPlan plan = plan_of({2, 2}, "topk", "none");
  plan.options.hierarchy = "parts";
  const auto records = run(plan, "threads");
  const std::uint64_t planned = planned_bytes(*TinyModel().arena, plan.options, 2, plan.density);
  for (const int host : {0, 1}) {
    const StepReport &first = records[2 * host].results[2], &second = records[2 * host + 1].results[2];
    CHECK(first.bytes_sent + second.bytes_sent == planned);
    CHECK(first.bytes_received == first.bytes_sent);  // of one other host, with as many entries
    CHECK(first.status.selected == 2 + (6 + 1) + 1 + 2);
    CHECK(second.status.selected == first.status.selected);
  }
}

TEST_CASE("in parts, all ranks and backends end with the same bits, whatever the arrival") {
  for (const auto& shape : {Cluster{2, 2}, Cluster{2, 3}})
    for (const std::string method : {"topk", "dgc", "gaussiank", "regtopk"}) {
      INFO(shape.hosts << " x " << shape.ranks_per_host << ", " << method);
      RunPlan plan = plan_of(shape, method, method == "regtopk" ? "all" : "none");
      plan.options.hierarchy = "parts";
      plan.options.scope = method == "gaussiank" ? "tensor" : "group";
      plan.options.dense_values = method == "dgc" ? "bf16" : "fp32";
      plan.options.compress.values = method == "dgc" ? "bf16" : "";
      plan.weights = shape.ranks_per_host == 2 ? std::vector<float>{0.5f, 1.5f, 1.75f, 0.25f} : plan.weights;
      const auto threads = run(plan, "threads");
      for (int r = 0; r < plan.ranks; ++r) CHECK(threads[r].averages == threads[0].averages);
      CHECK(threads[0].averages[3] != threads[0].averages[2]);
      if (shape.ranks_per_host == 3) continue;
      for (const std::string backend : {"link", "gloo"}) {
        const auto others = run(plan, backend);
        for (int r = 0; r < plan.ranks; ++r) {
          CHECK(others[r].averages == threads[r].averages);
          CHECK(others[r].residuals == threads[r].residuals);
        }
      }
    }
}

TEST_CASE("a part of a group has the group's segments and densities, cut") {
  GroupSpec group;
  group.numel = 100, group.ranks = 3, group.offset = 1000;
  group.segments = {{0, 30}, {30, 40}, {40, 100}};
  group.densities = {0.1, 0.2, 0.3};
  const GroupSpec part = part_of(group, 32, 64);
  CHECK((part.numel == 32 && part.ranks == 3 && part.offset == 1032));
  CHECK(part.segments == std::vector<std::pair<std::size_t, std::size_t>>{{0, 8}, {8, 32}});
  CHECK(part.densities == std::vector<double>{0.2, 0.3});
  CHECK(part_of(group, 100, 100).segments.empty());
  CHECK(part_of(group, 0, 100).segments == group.segments);
}

TEST_CASE("one rank's NaN makes all hosts skip the step, which leaves no trace") {
  struct Case {
    std::string hierarchy;
    std::size_t element;  // of a part of the first rank, and of the second
  };
  for (const auto& backend : kBackends)
    for (const Case& c : {Case{"leader", 5}, Case{"parts", 5}, Case{"parts", 44}}) {
      INFO(backend << ", " << c.hierarchy << ", " << c.element);
      RunPlan plan = plan_of({2, 2}, "topk", "none");
      plan.options.hierarchy = c.hierarchy;
      plan.steps = 3;
      plan.gradient = [element = c.element](std::int64_t step, int rank, std::size_t i) {
        return step == 1 && rank == 3 && i == element ? std::numeric_limits<float>::quiet_NaN()
                                                      : whole_value(step, rank, i);
      };
      plan.loss_finite = [](std::int64_t step, int rank) { return step != 2 || rank != 3; };
      const auto records = run(plan, backend);
      for (const RankRecord& record : records) {
        CHECK(record.results[0].committed());
        CHECK_FALSE(record.results[1].committed());
        CHECK(record.results[1].status.bad_rank == 2);  // a gradient: its host's first rank
        CHECK_FALSE(record.results[2].committed());
        CHECK(record.results[2].status.bad_rank == 3);  // a loss: the rank itself
        CHECK(record.residuals[1] == record.residuals[0]);
        CHECK(record.residuals[2] == record.residuals[0]);
      }
    }
}

TEST_CASE("a rank that gives up in a step ends all ranks of all hosts") {
  for (const auto& backend : kBackends) {
    const auto errors = errors_of_ranks(backend, 4, {600, false}, [&](Communicator& communicator) {
      TinyModel model;
      CollectiveQueue queue(communicator);
      RunPlan plan = plan_of({2, 2}, "topk", "none");
      Exchange exchange(*model.arena, queue, plan.options);
      exchange.begin_step({.density = 0.2});
      model.arena->mark_gradients_unwritten();
      // All have their splits.
      queue.run([](Communicator& c) { c.barrier(); });
      if (communicator.rank() == 3) {
        communicator.abort("the image cannot be read");
        throw std::runtime_error("the image cannot be read");
      }
      exchange.finish(true);
    });
    CHECK(errors[3] == "the image cannot be read");
    for (int r = 0; r < 3; ++r) CHECK(says(errors[r], {"rank 3: the image cannot be read"}));
  }
}

TEST_CASE("a hierarchy that cannot be is refused") {
  const auto errors_of = [](int ranks, const std::string& method, int ranks_per_host,
                            const std::string& hierarchy = "leader",
                            const std::string& collective = "all_gather") {
    return errors_of_ranks("threads", ranks, [&](Communicator& communicator) {
      TinyModel model;
      CollectiveQueue queue(communicator);
      ExchangeOptions options;
      options.compress.name = method;
      options.ranks_per_host = ranks_per_host;
      options.hierarchy = hierarchy, options.collective = collective;
      Exchange(*model.arena, queue, options);
    });
  };
  const auto refused = [&](const std::vector<std::string>& errors, const std::string& a,
                           const std::string& b = "") {
    for (const auto& error : errors) CHECK(says(error, {a, b}));
  };
  const std::string parts = "exchange.hierarchy: parts";
  refused(errors_of(4, "topk", 3), "exchange.ranks_per_host: 3 does not divide the 4 ranks");
  refused(errors_of(4, "dense", 2), "exchange.ranks_per_host: compress.name: dense");
  for (const std::string method : {"powersgd", "qsgd", "signsgd"})
    refused(errors_of(4, method, 2, "parts"), parts, "compress.name: " + method);
  for (const std::string collective : {"gtopk", "oktopk"})
    refused(errors_of(4, "topk", 2, "parts", collective), "exchange.collective: " + collective, parts);
  refused(errors_of(4, "demo", 2, "parts"), parts, "compress.transform: dct");
  CHECK(errors_of(1, "topk", 4) == std::vector<std::string>(1));  // one rank stands in for any number
}

}  // namespace topknot
