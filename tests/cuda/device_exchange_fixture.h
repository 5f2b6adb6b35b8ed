#pragma once
// Runs of the exchange over given gradients, on the CPU and on a GPU that the ranks, threads of the test,
// share.
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/cuda/device_exchange.h"
#include "dist/exchange/exchange.h"
#include "nn/core/rng.h"
#include "tests/cuda/fixture.h"
#include "tests/support/same_bits.h"

namespace topknot::testing {

// In the arena: conv, head, unused, middle | scale, bias. More than one block of a kernel, odd lengths,
// slices that are not aligned to four floats. "unused" is never ready.
struct ExchangeModel {
  explicit ExchangeModel(Device device = {}) : store(device) {
    const auto ones = [](std::span<float> values, const CounterRng&) {
      for (float& value : values) value = 1;
    };
    store.add("bias", {7}, ones);
    store.add("scale", {300}, ones);
    store.add("conv", {8, 3, 3, 3}, ones);
    store.add("middle", {35, 41}, ones);
    store.add("unused", {2, 3}, ones);
    store.add("head", {11, 3}, ones);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }

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
        return CounterRng(7, RngUse::test, std::uint32_t(step * 64 + rank)).normal(element);
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

inline std::vector<Parameter*> order_of(const ExchangePlan& plan, ParameterArena& arena, std::int64_t step,
                                        int rank) {
  std::vector<Parameter*> order;
  for (Parameter* parameter : arena.parameters())
    if (parameter->name() != "unused") order.push_back(parameter);
  if (plan.shuffled) std::shuffle(order.begin(), order.end(), std::mt19937(unsigned(step * 64 + rank)));
  return order;
}

inline void write_gradient(const ExchangePlan& plan, Parameter& parameter, Device device, std::int64_t step,
                           int rank) {
  std::vector<float> values(parameter.numel());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = plan.gradient(step, rank, parameter.offset() + i);
  backend(device).to_device(parameter.variable().gradient_target().data, values.data(), values.size());
}

// All groups laid out as the arena.
template <class Slice>
std::vector<float> gather(const std::vector<Group>& groups, ParameterArena& arena, Slice slice) {
  std::vector<float> result(arena.size());
  for (const Group& group : groups) {
    const std::span<const float> values = slice(group);
    backend(arena.device()).to_host(result.data() + group.begin, values.data(), values.size());
  }
  return result;
}

inline std::vector<float> residual_of(const std::vector<Group>& groups, ParameterArena& arena) {
  return gather(groups, arena, [&](const Group& group) { return arena.residual(group.begin, group.end); });
}

// Of steps: captured the first time that their key comes, and replayed then.
class StepGraphs {
 public:
  StepGraphs() = default;
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  ~StepGraphs() {
    for (const auto& [key, graph] : made_) cudaGraphExecDestroy(graph);
  }
  template <class Work>
  void run(std::pair<std::uint64_t, int> key, Work work) {
    const cudaStream_t stream = cuda::Context::current().stream();
    if (!made_.contains(key)) {
      cudaGraph_t graph = nullptr;
      TOPKNOT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      work();
      TOPKNOT_CUDA(cudaStreamEndCapture(stream, &graph));
      TOPKNOT_CUDA(cudaGraphInstantiate(&made_[key], graph, 0));
      TOPKNOT_CUDA(cudaGraphDestroy(graph));
    }
    TOPKNOT_CUDA(cudaGraphLaunch(made_[key], stream));
  }
  std::size_t size() const { return made_.size(); }

 private:
  std::map<std::pair<std::uint64_t, int>, cudaGraphExec_t> made_;
};

inline void exchange_step(Exchange& exchange, const std::vector<Parameter*>& order, const float* loss,
                          StepGraphs* graphs) {
  const auto encode = [&] {
    for (Parameter* parameter : order) exchange.ready(*parameter);
    exchange.end_backward(loss);
  };
  if (!graphs || exchange.capture() == Exchange::Capture::none) {
    encode();
    exchange.communicate();
    exchange.decode_and_commit();
  } else if (exchange.capture() == Exchange::Capture::whole) {
    graphs->run({exchange.capture_key(), 0}, [&] {
      encode();
      exchange.communicate();
      exchange.decode_and_commit();
    });
  } else {
    graphs->run({exchange.capture_key(), 0}, encode);
    exchange.communicate();
    graphs->run({exchange.capture_key(), 1}, [&] { exchange.decode_and_commit(); });
  }
}

using MakeExchange = std::function<std::unique_ptr<Exchange>(ParameterArena& arena, CollectiveQueue& queue)>;
using MakeDeviceExchange = std::function<std::unique_ptr<Exchange>(
    ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator& device)>;

// One rank's. `graphs`: ready() to decode_and_commit() are captured, as Exchange::capture() says, and
// replayed.
inline ExchangeRecord run_rank(const ExchangePlan& plan, Device where, Communicator& communicator, int rank,
                               const MakeExchange& make, bool graphs = false) {
  ExchangeRecord record;
  CollectiveQueue queue(communicator);
  auto model = std::make_unique<ExchangeModel>(where);
  auto exchange = make(*model->arena, queue);
  const Tensor loss = Tensor::zeros({1}, Layout::plain, where);
  StepGraphs captured;
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    if (step == plan.renewed) {
      const std::vector<std::byte> state = exchange->state();
      const std::vector<float> residual = residual_of(exchange->groups(), *model->arena);
      exchange.reset();
      model = std::make_unique<ExchangeModel>(where);
      exchange = make(*model->arena, queue);
      for (const Group& group : exchange->groups())
        backend(where).to_device(model->arena->residual(group.begin, group.end).data(),
                                 residual.data() + group.begin, group.numel());
      exchange->load_state(state);
    }
    ParameterArena& arena = *model->arena;
    exchange->begin_step({.step = step, .density = plan.density(step), .weights = plan.weights, .lr = 0.1});
    arena.mark_gradients_unwritten();
    const auto order = order_of(plan, arena, step, rank);
    for (Parameter* parameter : order) write_gradient(plan, *parameter, where, step, rank);
    const float value = plan.loss(step, rank);
    backend(where).to_device(const_cast<float*>(loss.data()), &value, 1);
    exchange_step(*exchange, order, loss.data(), graphs ? &captured : nullptr);
    StepStatus status;
    backend(where).to_host(reinterpret_cast<float*>(&status),
                           reinterpret_cast<const float*>(exchange->step_state().status),
                           sizeof status / sizeof(float));
    ExchangeRecord::Step& now = record.steps.emplace_back();
    now.committed = status.bad == 0, now.bad_rank = status.bad_rank;
    const auto averaged = [&](const Group& g) { return exchange->averaged(g); };
    if (now.committed) now.average = gather(exchange->groups(), arena, averaged);
    const StepReport report = exchange->end_step();
    // On a GPU they are counted there.
    now.selected = where.kind == DeviceKind::cpu ? report.status.selected : status.selected;
    record.bytes_sent = report.bytes_sent, record.bytes_received = report.bytes_received;
    if (now.committed && !same_bits(gather(exchange->groups(), arena, averaged), now.average))
      throw Error("end_step() lost the average");
    if (exchange->capture() == Exchange::Capture::none) exchange->state();  // residuals to the GPU
    now.residual = residual_of(exchange->groups(), arena);
  }
  record.state = exchange->state();
  record.graphs = captured.size();
  return record;
}

// By rank.
inline std::vector<ExchangeRecord> run_on_cpu(ExchangePlan plan) {
  plan.renewed = -1;
  std::vector<ExchangeRecord> records(std::size_t(plan.ranks));
  run_thread_ranks(plan.ranks, 60, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    records[std::size_t(rank)] =
        run_rank(plan, {}, communicator, rank, [&](ParameterArena& arena, CollectiveQueue& queue) {
          return std::make_unique<Exchange>(arena, queue, plan.options);
        });
  });
  return records;
}
inline std::vector<ExchangeRecord> run_on_gpu(const ExchangePlan& plan, const MakeDeviceExchange& make,
                                              bool graphs = false) {
  std::vector<ExchangeRecord> records(std::size_t(plan.ranks));
  run_thread_ranks(plan.ranks, 60, [&](Communicator& communicator) {
    const OnGpu gpu;
    const int rank = communicator.rank();
    const auto device = cuda::make_device_communicator(communicator, 60);
    records[std::size_t(rank)] = run_rank(
        plan, gpu.device(), communicator, rank,
        [&](ParameterArena& arena, CollectiveQueue& queue) { return make(arena, queue, *device); }, graphs);
  });
  return records;
}

// Rank 0 of two that do the same; its calls can be captured. `calls`: collectives are counted there.
class EchoCommunicator final : public cuda::DeviceCommunicator {
 public:
  explicit EchoCommunicator(std::size_t* calls = nullptr) : calls_(calls) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string backend() const override { return "echo"; }
  bool capturable() const override { return true; }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    count();
    for (const std::size_t rank : {0, 1})
      TOPKNOT_CUDA(cudaMemcpyAsync(all + rank * bytes, mine, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  void all_reduce(DType type, void* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    count();
    cuda::add(stream, type, data, data, data, n);
  }
  void all_gather_and_reduce(const std::byte* mine, std::byte* all, std::size_t bytes, float* data,
                             std::size_t n, cudaStream_t stream) override {
    DeviceCommunicator::all_gather_and_reduce(mine, all, bytes, data, n, stream);
    if (calls_) --*calls_;
  }
  void broadcast(std::byte*, std::size_t, int, cudaStream_t) override {}
  std::unique_ptr<cuda::DeviceCommunicator> split(Communicator&) override { throw Error("not split here"); }
  void wait(cudaStream_t stream) override { TOPKNOT_CUDA(cudaStreamSynchronize(stream)); }
  void abort(const std::string&) noexcept override {}

 private:
  void count() {
    if (calls_) ++*calls_;
  }
  std::size_t* calls_;
};

// The gradients and losses are rank 0's on both ranks of an EchoCommunicator.
inline ExchangeRecord run_echo(const ExchangePlan& plan, const MakeDeviceExchange& make, bool graphs) {
  const OnGpu gpu;
  const auto alone = make_thread_group(1, 60);
  std::size_t calls = 0;
  EchoCommunicator device(&calls);
  ExchangeRecord record = run_rank(
      plan, gpu.device(), *alone[0], 0,
      [&](ParameterArena& arena, CollectiveQueue& queue) { return make(arena, queue, device); }, graphs);
  record.collectives = calls;
  return record;
}

inline ExchangePlan plan_of(const std::string& method, int ranks, const std::string& merge = "all") {
  ExchangePlan plan;
  plan.options.compress.name = method;
  plan.options.merge = merge;
  plan.options.ordered_sum = true;
  plan.ranks = ranks;
  return plan;
}

inline MakeDeviceExchange on_gpu(const ExchangeOptions& options) {
  return [options](ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator& device) {
    auto exchange = cuda::make_device_exchange(arena, queue, &device, options);
    if (exchange->capture() == cuda::DeviceExchange::Capture::none) throw Error("went through the CPU");
    return exchange;
  };
}
// The CPU's exchange over copies of the gradients.
inline MakeDeviceExchange staged(const ExchangeOptions& options) {
  return [options](ParameterArena& arena, CollectiveQueue& queue, cuda::DeviceCommunicator&) {
    return cuda::make_staged_exchange(arena, queue, options);
  };
}

// Outcome, averages and residuals of every step and rank, bit for bit. `dense`: the plan if all groups are dense; a rank then
// knows of its own loss alone.
inline void check_same(const std::vector<ExchangeRecord>& gpu, const std::vector<ExchangeRecord>& cpu,
                       const ExchangePlan* dense = nullptr) {
  REQUIRE(gpu.size() == cpu.size());
  for (std::size_t rank = 0; rank < gpu.size(); ++rank) {
    REQUIRE(gpu[rank].steps.size() == cpu[rank].steps.size());
    for (std::size_t step = 0; step < gpu[rank].steps.size(); ++step) {
      const auto &ours = gpu[rank].steps[step], &theirs = cpu[rank].steps[step];
      INFO("rank " << rank << ", step " << step);
      REQUIRE(ours.committed == theirs.committed);
      int bad_rank = theirs.bad_rank;
      if (dense && gpu.size() > 1)
        bad_rank = std::isfinite(dense->loss(std::int64_t(step), int(rank))) ? -1 : int(rank);
      CHECK(ours.bad_rank == bad_rank);
      if (theirs.committed) CHECK(ours.selected == theirs.selected);
      REQUIRE(same_bits(ours.average, theirs.average));
      REQUIRE(same_bits(ours.residual, theirs.residual));
    }
    CHECK(gpu[rank].state == cpu[rank].state);
  }
}

}  // namespace topknot::testing
