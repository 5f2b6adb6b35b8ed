// What goes wrong in the middle of a GPU's exchange ends every rank; and orders that a GPU may choose.
#include "dist/comm/cuda/device_communicator.h"
#include "tests/cuda/device_exchange_fixture.h"
#include "tests/dist/ranks.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot {
namespace {

using namespace topknot::testing;

ExchangeOptions exchange_options(const std::string& method) {
  return plan_of(method, 3, "none").options;
}

// Four steps; `disturb(step, place, rank)` is called at each of a step's places: 0 after the first parameter
// is ready, 1 before the end, 2 between collectives and decoding.
template <class Disturb>
std::vector<std::string> errors_of(const MakeDeviceExchange& make, Disturb disturb) {
  return errors_of_ranks("threads", 3, {100, true}, [&](Communicator& communicator) {
    const OnGpu gpu;
    ExchangeModel model(gpu.device());
    CollectiveQueue queue(communicator);
    const auto device = cuda::make_device_communicator(communicator, 20);
    const auto exchange = make(*model.arena, queue, *device);
    for (int step = 0; step < 4; ++step) {
      exchange->begin_step({.step = step, .density = 0.1, .lr = 0.1});
      model.arena->mark_gradients_unwritten();
      bool first = true;
      for (Parameter* parameter : model.arena->parameters()) {
        backend(gpu.device()).fill(parameter->variable().gradient_target().data, parameter->numel(), 1.0f);
        exchange->ready(*parameter);
        if (std::exchange(first, false)) disturb(step, 0, communicator.rank());
      }
      disturb(step, 1, communicator.rank());
      exchange->end_backward(nullptr);
      exchange->communicate();
      disturb(step, 2, communicator.rank());
      exchange->decode_and_commit();
      exchange->end_step();
    }
    device->wait(gpu.stream());
  });  // far beyond a step under a sanitizer, on a busy machine
}

TEST_CASE("a rank that gives up in the middle of a step ends the others, with its reason") {
  for (const std::string method : {"dense", "topk"})
    for (const bool stays : {true, false})
      for (const int place : {0, 1, 2}) {
        const auto make = stays ? on_gpu(exchange_options(method)) : staged(exchange_options(method));
        const auto errors = errors_of(make, [place](int step, int at, int rank) {
          if (step == 2 && at == place && rank == 1) throw Error("rank 1 has had enough");
        });
        INFO(method << ", place " << place);
        CHECK(errors[1] == "rank 1 has had enough");
        for (const int rank : {0, 2}) CHECK(says(errors[rank], {"rank 1 has had enough"}));
      }
}

TEST_CASE("a GPU that is lost in the middle of a step ends every rank") {
  for (const bool stays : {true, false})
    for (const int place : {0, 1, 2}) {
      const emulator::Settings settings;
      const auto make = stays ? on_gpu(exchange_options("topk")) : staged(exchange_options("topk"));
      const auto errors = errors_of(make, [place](int step, int at, int rank) {
        if (step == 2 && at == place && rank == 1) emulator::lose_device();
      });
      for (const std::string& error : errors) CHECK(says(error, {"the GPU is lost"}));
    }
}

TEST_CASE("a kernel that cannot be started ends every rank with one message") {
  const emulator::Settings settings;
  const auto errors = errors_of(on_gpu(exchange_options("dense")), [](int step, int at, int rank) {
    if (step == 1 && at == 1 && rank == 0) emulator::fail("cudaLaunchKernel", cudaErrorInvalidConfiguration);
  });
  for (const std::string& error : errors) CHECK(says(error, {"cudaErrorInvalidConfiguration"}));
}

TEST_CASE("memory for the exchange that is not to be had is said to be short") {
  const emulator::Settings settings;
  const OnGpu gpu;
  ExchangeModel model(gpu.device());
  const auto alone = make_thread_group(1, 20);
  CollectiveQueue queue(*alone[0]);
  EchoCommunicator device;
  emulator::fail("cudaMalloc", cudaErrorMemoryAllocation);
  CHECK_THROWS_AS(on_gpu(exchange_options("topk"))(*model.arena, queue, device), cuda::OutOfMemory);
}

TEST_CASE("the parameters of a step reach the GPU whole, however far the host is ahead") {
  const OnGpu gpu;
  ExchangeModel model(gpu.device());
  const auto alone = make_thread_group(1, 20);
  CollectiveQueue queue(*alone[0]);
  EchoCommunicator device;
  const auto exchange = cuda::make_gpu_exchange(*model.arena, queue, device, exchange_options("dense"));
  constexpr int kSteps = 50;
  const cuda::DeviceArray<StepParameters> log(kSteps);
  for (int step = 0; step < kSteps; ++step) {
    exchange->begin_step({.step = step, .density = 0.5, .lr = 1.0 / (1 + step)});
    exchange->end_backward(nullptr);
    exchange->communicate();
    exchange->decode_and_commit();
    TOPKNOT_CUDA(cudaMemcpyAsync(log.data() + step, exchange->step_state().parameters, sizeof(StepParameters),
                                 cudaMemcpyDeviceToDevice, gpu.stream()));
    exchange->end_step();
  }
  std::vector<StepParameters> parameters(kSteps);
  TOPKNOT_CUDA(
      cudaMemcpyAsync(parameters.data(), log.data(), log.bytes(), cudaMemcpyDeviceToHost, gpu.stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(gpu.stream()));
  for (int step = 0; step < kSteps; ++step) {
    CHECK(parameters[step].step == step);
    CHECK(parameters[step].lr == 1.0 / (1 + step));
  }
}

}  // namespace
}  // namespace topknot
