// The CPU's exchange over copies of the gradients is the CPU's exchange.
#include <cmath>

#include "dist/comm/communicator.h"
#include "tests/cuda/device_exchange_fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

using namespace topknot::testing;

MakeDeviceExchange staged(const ExchangePlan& plan) {
  return [plan](ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator&) {
    return cuda::make_staged_exchange(arena, queue, plan.options);
  };
}

TEST_CASE("gradients that go through the CPU are averaged as there, whatever the method",
          "[device_exchange]") {
  struct Case {
    std::string method, collective = "all_gather", dense_values = "fp32";
    int ranks = 2, ranks_per_host = 0;
  };
  for (const Case& c :
       {Case{"signsgd"}, Case{"powersgd"}, Case{"topk", "oktopk", "fp32", 3}, Case{"topk", "gtopk"},
        Case{"topk", "all_gather", "bf16"}, Case{"topk", "all_gather", "fp32", 4, 2}, Case{"dense"}}) {
    ExchangePlan plan;
    plan.options.compress.name = c.method;
    plan.options.collective = c.collective;
    plan.options.dense_values = c.dense_values;
    plan.options.ranks_per_host = c.ranks_per_host;
    plan.options.merge = "size:4000";
    plan.ranks = c.ranks;
    plan.shuffled = c.ranks_per_host == 0;
    plan.weights.assign(static_cast<std::size_t>(c.ranks), 1.0f);
    plan.weights[0] = 0.5f, plan.weights[1] = 1.5f;
    plan.renewed = c.ranks_per_host == 0 ? 6 : -1;
    INFO(c.method << ", " << c.collective << ", " << c.ranks << " ranks");
    const auto gpu = run_on_gpu(plan, staged(plan)), cpu = run_on_cpu(plan);
    check_same(gpu, cpu);
    CHECK(gpu[0].bytes_sent == cpu[0].bytes_sent);
    CHECK(gpu[0].bytes_received == cpu[0].bytes_received);
  }
}

TEST_CASE("a step that the CPU refuses is refused on the GPU", "[device_exchange]") {
  ExchangePlan plan;
  plan.options.compress.name = "topk";
  const auto healthy = plan.gradient;
  plan.gradient = [healthy](std::int64_t step, int rank, std::size_t element) {
    return step == 2 && rank == 1 && element == 100 ? NAN : healthy(step, rank, element);
  };
  plan.loss = [](std::int64_t step, int rank) { return step == 4 && rank == 1 ? NAN : 0.5f; };
  const auto gpu = run_on_gpu(plan, staged(plan));
  check_same(gpu, run_on_cpu(plan));
  for (const int step : {2, 4}) CHECK(gpu[0].steps[step].bad_rank == 1);
}

TEST_CASE("what has no kernels goes through the CPU, without a word from the user", "[device_exchange]") {
  const auto make = [](const ExchangePlan& plan) {
    return [plan](ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator& device) {
      auto exchange = cuda::make_device_exchange(arena, queue, &device, plan.options);
      if (exchange->capture() != cuda::DeviceExchange::Capture::none) throw Error("stayed on the GPU");
      return exchange;
    };
  };
  ExchangePlan plan;
  plan.options.compress.name = "powersgd";
  check_same(run_on_gpu(plan, make(plan)), run_on_cpu(plan));
  plan.options.compress.name = "topk";
  plan.options.collective = "gtopk";
  check_same(run_on_gpu(plan, make(plan)), run_on_cpu(plan));
}

TEST_CASE("options that contradict each other are refused as on the CPU", "[device_exchange]") {
  const OnGpu gpu;
  const ExchangeModel model(gpu.device());
  const auto alone = make_thread_group(1, 20);
  CollectiveQueue queue(*alone[0]);
  const auto device = echo_communicator();
  const auto make = [&](const ExchangeOptions& options) {
    return [&] { cuda::make_device_exchange(*model.arena, queue, device.get(), options); };
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

TEST_CASE("what keeps gradients from staying on the GPU is named", "[device_exchange]") {
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
