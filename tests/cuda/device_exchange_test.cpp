// The exchange on a GPU is the CPU's, bit for bit: averages, residuals, outcomes and saved state.
#include "tests/cuda/device_exchange_fixture.h"

namespace topknot {
namespace {

using namespace topknot::testing;

std::vector<float> uneven(int ranks) {
  std::vector<float> weights;
  for (int rank = 0; rank < ranks; ++rank)
    weights.push_back(ranks == 1 ? 1.0f : 0.5f + float(rank) / float(ranks - 1));
  return weights;
}

TEST_CASE("a dense average on the GPU is the CPU's, in any order of blocks and threads") {
  const auto order = GENERATE(from_range(orders()))();
  for (const int ranks : {1, 2, 3})
    for (const std::string merge : {"none", "all", "size:2000"})
      for (const bool narrow : {false, true}) {
        ExchangePlan plan = plan_of("dense", ranks, merge);
        plan.steps = 3;
        plan.shuffled = true;
        if (narrow) plan.options.compress.values = "bf16";
        if (merge == "all") plan.weights = uneven(ranks);
        const auto plain = plan.gradient;
        plan.gradient = [plain](std::int64_t step, int rank, std::size_t element) {
          return element % 100 == 7 ? -0.0f : plain(step, rank, element);  // the CPU's average is +0
        };
        const auto gpu = run_on_gpu(plan, on_gpu(plan.options)), cpu = run_on_cpu(plan);
        check_same(gpu, cpu);
        CHECK(gpu[0].bytes_sent == cpu[0].bytes_sent);
        CHECK(gpu[0].bytes_received == cpu[0].bytes_received);
      }
}

TEST_CASE("sparse groups and the dense ones beside them are the CPU's") {
  for (const std::string scope : {"model", "group", "tensor"})
    for (const std::string merge : {"none", "all", "size:2000"}) {
      if (scope == "model" && merge != "all") continue;
      for (const int ranks : {1, 3}) {
        INFO(scope << ", " << merge << ", " << ranks << " ranks");
        ExchangePlan plan = plan_of("topk", ranks, merge);
        plan.options.scope = scope;
        plan.steps = 4;
        plan.options.ordered_sum =
            false;  // the dense groups of a method are summed in rank order all the same
        plan.shuffled = ranks == 3;
        if (merge != "none") plan.weights = uneven(ranks);
        const auto gpu = run_on_gpu(plan, on_gpu(plan.options));
        check_same(gpu, run_on_cpu(plan));
        // Blocks of the two others, and sums of the vectors' 307 elements.
        const std::uint64_t sent = gpu[0].bytes_sent, sums = 307 * sizeof(float);
        CHECK(gpu[0].bytes_received == (ranks == 1 ? 0 : 2 * (sent - sums) + sums));
      }
    }
}

TEST_CASE("hosts of several ranks sum inside and compress across on the GPU as on the CPU") {
  struct Shape {
    int hosts, ranks_per_host;
  };
  for (const Shape shape : {Shape{2, 2}, Shape{1, 3}, Shape{3, 2}})
    for (const std::string method :
         {"topk", "dgc", "gaussiank", "topk parts", "dgc parts", "gaussiank parts"})
      for (const std::string merge : {"none", "all", "size:4000"}) {
        INFO(shape.hosts << " x " << shape.ranks_per_host << ", " << method << ", " << merge);
        const bool parts = method.ends_with("parts");
        ExchangePlan plan =
            plan_of(method.substr(0, method.find(' ')), shape.hosts * shape.ranks_per_host, merge);
        plan.options.ranks_per_host = shape.ranks_per_host;
        plan.options.hierarchy = parts ? "parts" : "leader";
        plan.options.scope = parts && merge == "size:4000" ? "tensor" : "group";
        plan.options.compress.momentum = method.starts_with("dgc") ? 0.9 : 0.0;
        plan.steps = 6;
        if (merge == "all") plan.weights = uneven(plan.ranks);
        // In a compressed group, in a dense one, and the loss alone.
        plan.gradient = [healthy = plan.gradient](std::int64_t step, int rank, std::size_t element) {
          if (step == 1 && rank == 3 && element == 100) return NAN;
          if (step == 2 && rank == 1 && element == 1700) return INFINITY;
          return healthy(step, rank, element);
        };
        plan.loss = [](std::int64_t step, int rank) { return step == 4 && rank >= 1 ? NAN : 0.5f; };
        const auto gpu = run_on_gpu(plan, [&](auto& arena, auto& queue, auto& device) {
          return cuda::make_gpu_exchange(arena, queue, device, plan.options);
        });
        check_same(gpu, run_on_cpu(plan));
        CHECK(gpu[0].steps[1].committed == (plan.ranks == 3));
        CHECK(gpu[0].steps[4].bad_rank == 1);
        for (const auto& record : gpu)
          for (int step = 0; step < plan.steps; ++step)
            CHECK(same_bits(record.steps[step].average, gpu[0].steps[step].average));
        // The first rank of a host speaks for it, or each for its part.
        CHECK((gpu[0].bytes_sent > 0));
        CHECK((gpu[1].bytes_sent > 0) == parts);
      }
}

TEST_CASE("a NaN of one rank refuses the step on all, and nothing has changed") {
  for (const std::string method : {"dense", "dense bf16", "topk"})
    for (const std::string merge : {"none", "all"}) {
      ExchangePlan plan = plan_of(method.substr(0, method.find(' ')), 3, merge);
      if (method == "dense bf16") plan.options.compress.values = "bf16";
      const auto healthy = plan.gradient;
      // In a compressed group at step 2, of two ranks at step 3, in a dense one at step 4, the loss alone at
      // steps 6 and 7, and of another rank than the gradient at step 9.
      plan.gradient = [healthy](std::int64_t step, int rank, std::size_t element) {
        if (step == 2 && rank == 1 && element == 100) return NAN;
        if (step == 3 && rank > 0 && element == 100) return NAN;
        if (step == 9 && rank == 1 && element == 100) return NAN;
        if (step == 4 && rank == 2 && element == 1700) return INFINITY;
        return healthy(step, rank, element);
      };
      plan.loss = [](std::int64_t step, int rank) {
        return (step == 6 && rank == 2) || (step == 7 && rank > 0) || (step == 9 && rank == 2) ? NAN : 0.5f;
      };
      const auto gpu = run_on_gpu(plan, on_gpu(plan.options));
      const auto cpu = run_on_cpu(plan);
      for (const auto& record : gpu) {
        for (const int step : {2, 3, 4, 6, 7, 9}) CHECK_FALSE(record.steps[step].committed);
        CHECK(record.steps[8].committed);
      }
      const auto& second = gpu[1].steps;
      const bool dense = method != "topk";
      CHECK(second[6].bad_rank == (dense ? -1 : 2));
      CHECK(second[7].bad_rank == 1);
      CHECK(second[9].bad_rank == (dense ? -1 : 2));
      CHECK(gpu[2].steps[9].bad_rank == 2);
      check_same(gpu, cpu, dense ? &plan : nullptr);
    }
}

TEST_CASE("a GPU's exchange goes on from what was saved") {
  ExchangePlan plan = plan_of("dgc", 2, "size:4000");
  plan.options.compress.momentum = 0.9;
  plan.renewed = 5;
  check_same(run_on_gpu(plan, on_gpu(plan.options)), run_on_cpu(plan));
}

TEST_CASE("momentum, masks and thresholds: steps are captured as two graphs about the collectives, or run") {
  for (const std::string method : {"dense", "dense bf16", "topk", "gaussiank", "dgc", "regtopk"}) {
    INFO(method);
    ExchangePlan plan = plan_of(method.substr(0, method.find(' ')), 2, "size:4000");
    if (method == "dense bf16") plan.options.compress.values = "bf16";
    plan.options.compress.momentum = method == "dgc" ? 0.9 : 0.0;
    plan.weights = uneven(2);
    plan.density = [](std::int64_t step) { return step < 2 ? 0.2 : 0.05; };
    plan.loss = [](std::int64_t step, int rank) { return step == 4 && rank == 1 ? INFINITY : 0.0f; };
    const bool dense = method.starts_with("dense");
    const auto cpu = run_on_cpu(plan);
    if (!dense) CHECK(cpu[0].steps[0].selected > cpu[0].steps[9].selected);
    for (const bool graphs : {false, true}) {
      const auto gpu = run_on_gpu(plan, on_gpu(plan.options), graphs);
      check_same(gpu, cpu, dense ? &plan : nullptr);
      // Two parts; of two densities; where slices swap, for each side of the arena.
      CHECK(gpu[1].graphs == (!graphs ? 0u : dense ? 4u : 8u));
    }
  }
}

TEST_CASE("a rank's word on its loss goes with the last group, a short dense group with a compressed one") {
  for (const std::string merge : {"none", "all"}) {
    ExchangePlan plan = plan_of("topk", 2, merge);  // with a dense group
    const auto one = plan.gradient;
    plan.gradient = [one](std::int64_t step, int, std::size_t element) { return one(step, 0, element); };
    plan.loss = [](std::int64_t step, int) { return step == 4 ? NAN : 0.0f; };
    const ExchangeRecord record = run_echo(plan, on_gpu(plan.options), false);
    check_same({record}, {run_on_cpu(plan)[0]});
    ExchangeModel model;
    CHECK(record.collectives == plan.steps * (plan_groups(*model.arena, plan.options).size() - 1));
    const ExchangePlan dense = plan_of("dense", 2, merge);
    CHECK(run_echo(dense, on_gpu(dense.options), false).collectives ==
          dense.steps * plan_groups(*model.arena, dense.options).size());
  }
}

TEST_CASE("a whole step is one graph where the collectives can be captured") {
  for (const std::string method : {"dense", "topk"}) {
    ExchangePlan plan = plan_of(method, 2, "none");
    const auto healthy = plan.gradient;
    plan.gradient = [healthy](std::int64_t step, int, std::size_t element) {
      return step == 6 && element == 100 ? NAN : healthy(step, 0, element);
    };
    plan.loss = [](std::int64_t step, int) { return step == 4 ? NAN : 0.0f; };
    const auto cpu = run_on_cpu(plan);
    const std::size_t sides = method == "dense" ? 1 : 2;
    for (const bool graphs : {false, true}) {
      const ExchangeRecord record = run_echo(plan, on_gpu(plan.options), graphs);
      check_same({record}, {cpu[0]});
      CHECK(record.graphs == (graphs ? sides : 0));
    }
    plan.ranks = 1;
    const auto alone = run_on_gpu(plan, on_gpu(plan.options), true);
    check_same(alone, run_on_cpu(plan));
    CHECK(alone[0].graphs == sides);
  }
}

TEST_CASE("gradients that go through the CPU are averaged or refused as there, whatever the method") {
  struct Case {
    std::string method, collective = "all_gather", dense_values = "fp32";
    int ranks = 2, ranks_per_host = 0;
    std::string hierarchy = "leader", values = "";
  };
  for (const Case& c :
       {Case{"signsgd"}, Case{"powersgd"}, Case{"topk", "oktopk", "fp32", 3}, Case{"topk", "gtopk"},
        Case{"topk", "all_gather", "bf16"}, Case{"topk", "all_gather", "fp32", 4, 2},
        Case{"topk", "all_gather", "bf16", 4, 2, "parts"}, Case{"dense"},
        Case{"dense", "all_gather", "fp32", 3, 0, "leader", "int8"}}) {
    ExchangePlan plan;
    plan.options.compress.name = c.method;
    plan.options.compress.values = c.values;
    plan.options.collective = c.collective;
    plan.options.dense_values = c.dense_values;
    plan.options.ranks_per_host = c.ranks_per_host;
    plan.options.hierarchy = c.hierarchy;
    plan.options.merge = "size:4000";
    plan.ranks = c.ranks;
    plan.shuffled = c.ranks_per_host == 0;
    plan.weights.assign(std::size_t(c.ranks), 1.0f);
    plan.weights[0] = 0.5f, plan.weights[1] = 1.5f;
    plan.renewed = c.ranks_per_host == 0 ? 6 : -1;
    INFO(c.method << ", " << c.collective << ", " << c.ranks << " ranks");
    if (c.ranks_per_host == 0) {
      plan.gradient = [healthy = plan.gradient](std::int64_t step, int rank, std::size_t element) {
        return step == 2 && rank == 1 && element == 100 ? NAN : healthy(step, rank, element);
      };
      plan.loss = [](std::int64_t step, int rank) { return step == 4 && rank == 1 ? NAN : 0.5f; };
    }
    const auto cpu = run_on_cpu(plan);
    const auto check = [&](const MakeDeviceExchange& make) {
      const auto gpu = run_on_gpu(plan, make);
      check_same(gpu, cpu);
      CHECK(gpu[0].bytes_sent == cpu[0].bytes_sent);
      CHECK(gpu[0].bytes_received == cpu[0].bytes_received);
    };
    check(staged(plan.options));
    if (c.method == "topk" && c.collective == "all_gather" && c.ranks_per_host == 0) {
      for (const int step : {2, 4}) CHECK(cpu[0].steps[step].bad_rank == 1);
    } else if (c.method == "powersgd" || c.collective == "gtopk" || !c.values.empty()) {
      // What has no kernels goes through the CPU, without a word from the user.
      check([&](ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator& device) {
        auto exchange = cuda::make_device_exchange(arena, queue, &device, plan.options);
        if (exchange->capture() != cuda::DeviceExchange::Capture::none) throw Error("stayed on the GPU");
        return exchange;
      });
    }
  }
}

TEST_CASE("options that contradict each other are refused as on the CPU") {
  const OnGpu gpu;
  const ExchangeModel model(gpu.device());
  const auto alone = make_thread_group(1, 20);
  CollectiveQueue queue(*alone[0]);
  EchoCommunicator device;
  const auto make = [&](const ExchangeOptions& options) {
    return [&] { cuda::make_device_exchange(*model.arena, queue, &device, options); };
  };
  ExchangeOptions options;
  options.compress.name = "topkk";
  CHECK(user_error(make(options), {"compress.name", "topkk"}));
  options.compress.name = "dense";
  options.compress.memory = "residual";
  CHECK(user_error(make(options), {"compress.memory"}));
  options = {};
  options.compress.name = "topk", options.scope = "model", options.merge = "none";
  CHECK(user_error(make(options), {"compress.scope", "exchange.merge"}));
}

TEST_CASE("what keeps gradients from staying on the GPU is named") {
  ExchangeOptions options;
  options.compress.name = "topk";
  options.ranks_per_host = 2;
  CHECK(cuda::what_needs_the_host(options).empty());
  options.dense_values = "bf16";
  CHECK(cuda::what_needs_the_host(options) == "compress.dense_values: bf16");
  options.collective = "gtopk";
  CHECK(cuda::what_needs_the_host(options) == "exchange.collective: gtopk");
}

}  // namespace
}  // namespace topknot
