#pragma once
// Runs of the exchange over given gradients, on the CPU and on a GPU that the ranks, threads of the test, share.

#include <functional>
#include <memory>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/cuda/device_exchange.h"
#include "dist/exchange/exchange.h"
#include "nn/core/rng.h"
#include "tests/support/same_bits.h"

namespace topknot::testing {

// In the arena: conv, head, unused, middle | scale, bias. More than one block of a kernel, odd lengths, slices that
// are not aligned to four floats. "unused" is never ready.
struct ExchangeModel {
  explicit ExchangeModel(Device device = {});
  ParameterStore store;
  ParameterArena* arena;
};

struct ExchangePlan {
  ExchangeOptions options;
  int ranks = 2, steps = 10;
  std::function<double(std::int64_t step)> density = [](std::int64_t) { return 0.1; };
  std::vector<float> weights = {};
  std::function<float(std::int64_t step, int rank, std::size_t element)> gradient =
      [](std::int64_t step, int rank, std::size_t element) {
        return CounterRng(7, RngUse::test, static_cast<std::uint32_t>(step * 64 + rank)).normal(element);
      };
  std::function<float(std::int64_t step, int rank)> loss = [](std::int64_t, int) { return 1.0f; };
  bool shuffled = false;  // the order in which parameters become ready
  int renewed = -1;       // before this step, model and exchange are made anew and go on from what was saved
};

struct ExchangeRecord {
  struct Step {
    bool committed = false;
    int bad_rank = -1;
    std::uint64_t selected = 0;
    std::vector<float> average;  // of the whole arena; empty where the step was refused
    std::vector<float> residual;
  };
  std::vector<Step> steps;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // of the last step
  std::vector<std::byte> state;                      // after the last step
  std::size_t graphs = 0;                            // that were captured
  std::size_t collectives = 0;                       // of run_echo(): as called, a graph's once
};

// By rank.
std::vector<ExchangeRecord> run_on_cpu(const ExchangePlan& plan);

using MakeDeviceExchange = std::function<std::unique_ptr<cuda::DeviceExchange>(
    ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator& device)>;
// `graphs`: ready() to decode_and_commit() are captured, as Exchange::capture() says, and replayed.
std::vector<ExchangeRecord> run_on_gpu(const ExchangePlan& plan, const MakeDeviceExchange& make,
                                       bool graphs = false);
// The gradients and losses are rank 0's on both ranks of echo_communicator().
ExchangeRecord run_echo(const ExchangePlan& plan, const MakeDeviceExchange& make, bool graphs);

// Rank 0 of two that do the same; its calls can be captured.
// `calls`: collectives are counted there.
std::unique_ptr<cuda::DeviceCommunicator> echo_communicator(std::size_t* calls = nullptr);

// Bit for bit.
// Outcome, averages and residuals of every step and rank.
void check_same(const std::vector<ExchangeRecord>& gpu, const std::vector<ExchangeRecord>& cpu);

}  // namespace topknot::testing
