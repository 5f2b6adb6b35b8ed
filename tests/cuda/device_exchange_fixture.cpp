#include "tests/cuda/device_exchange_fixture.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "dist/comm/communicator.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot::testing {

using cuda::Context;
using cuda::DeviceExchange;

ExchangeModel::ExchangeModel(Device device) : store(device) {
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

namespace {

std::vector<Parameter*> order_of(const ExchangePlan& plan, ParameterArena& arena, std::int64_t step,
                                 int rank) {
  std::vector<Parameter*> order;
  for (Parameter* parameter : arena.parameters())
    if (parameter->name() != "unused") order.push_back(parameter);
  if (plan.shuffled)
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step * 64 + rank)));
  return order;
}

void write_gradient(const ExchangePlan& plan, Parameter& parameter, Device device, std::int64_t step,
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

std::vector<float> residual_of(const std::vector<Group>& groups, ParameterArena& arena) {
  return gather(groups, arena, [&](const Group& group) { return arena.residual(group.begin, group.end); });
}

class Graphs {
 public:
  Graphs() = default;
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;
  ~Graphs() {
    for (const auto& [key, graph] : made_) cudaGraphExecDestroy(graph);
  }
  // Captures `work` the first time that this key comes, and replays it then.
  template <class Work>
  void run(std::pair<std::uint64_t, int> key, Work work) {
    const cudaStream_t stream = Context::current().stream();
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

void exchange_step(DeviceExchange& exchange, const std::vector<Parameter*>& order, const float* loss,
                   Graphs* graphs) {
  const auto encode = [&] {
    for (Parameter* parameter : order) exchange.ready(*parameter);
    exchange.end_backward(loss);
  };
  if (!graphs || exchange.capture() == DeviceExchange::Capture::none) {
    encode();
    exchange.communicate();
    exchange.decode_and_commit();
  } else if (exchange.capture() == DeviceExchange::Capture::whole) {
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

template <class T>
T from_gpu(const T* at) {
  T value;
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemcpyAsync(&value, at, sizeof value, cudaMemcpyDeviceToHost, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  return value;
}

}  // namespace

std::vector<ExchangeRecord> run_on_cpu(const ExchangePlan& plan) {
  std::vector<ExchangeRecord> records(static_cast<std::size_t>(plan.ranks));
  run_thread_ranks(plan.ranks, 60, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
    ExchangeModel model;
    ParameterArena& arena = *model.arena;
    CollectiveQueue queue(communicator);
    Exchange exchange(arena, queue, plan.options);
    for (std::int64_t step = 0; step < plan.steps; ++step) {
      exchange.begin_step({.step = step, .density = plan.density(step), .weights = plan.weights, .lr = 0.1});
      arena.clear_gradients();
      for (Parameter* parameter : order_of(plan, arena, step, rank)) {
        write_gradient(plan, *parameter, {}, step, rank);
        exchange.ready(*parameter);
      }
      const StepReport report = exchange.finish(std::isfinite(plan.loss(step, rank)));
      ExchangeRecord::Step& now = record.steps.emplace_back();
      now.committed = report.committed(), now.bad_rank = report.status.bad_rank;
      now.selected = report.status.selected;
      if (now.committed)
        now.average = gather(exchange.groups(), arena, [&](const Group& g) { return exchange.averaged(g); });
      now.residual = residual_of(exchange.groups(), arena);
      record.bytes_sent = report.bytes_sent, record.bytes_received = report.bytes_received;
    }
    record.state = exchange.state();
  });
  return records;
}

namespace {

ExchangeRecord run_rank(const ExchangePlan& plan, Communicator& communicator,
                        cuda::DeviceCommunicator& device, const MakeDeviceExchange& make, bool graphs) {
  ExchangeRecord record;
  const Device gpu = Context::current().device();
  CollectiveQueue queue(communicator);
  auto model = std::make_unique<ExchangeModel>(gpu);
  auto exchange = make(*model->arena, queue, device);
  const cuda::DeviceArray<float> loss(1);
  Graphs captured;
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    if (step == plan.renewed) {
      const std::vector<std::byte> state = exchange->state();
      const std::vector<float> residual = residual_of(exchange->groups(), *model->arena);
      exchange.reset();
      model = std::make_unique<ExchangeModel>(gpu);
      exchange = make(*model->arena, queue, device);
      for (const Group& group : exchange->groups())
        backend(gpu).to_device(model->arena->residual(group.begin, group.end).data(),
                               residual.data() + group.begin, group.numel());
      exchange->load_state(state);
    }
    ParameterArena& arena = *model->arena;
    exchange->begin_step({.step = step, .density = plan.density(step), .weights = plan.weights, .lr = 0.1});
    arena.clear_gradients();
    const auto order = order_of(plan, arena, step, device.rank());
    for (Parameter* parameter : order) write_gradient(plan, *parameter, gpu, step, device.rank());
    const float value = plan.loss(step, device.rank());
    backend(gpu).to_device(loss.data(), &value, 1);
    exchange_step(*exchange, order, loss.data(), graphs ? &captured : nullptr);
    const StepStatus status = from_gpu(exchange->step_state().status);
    ExchangeRecord::Step& now = record.steps.emplace_back();
    now.committed = status.bad == 0, now.bad_rank = status.bad_rank, now.selected = status.selected;
    const auto averaged = [&](const Group& g) { return exchange->averaged(g); };
    if (now.committed) now.average = gather(exchange->groups(), arena, averaged);
    const StepReport report = exchange->end_step();
    record.bytes_sent = report.bytes_sent, record.bytes_received = report.bytes_received;
    if (now.committed && !same_bits(gather(exchange->groups(), arena, averaged), now.average))
      throw Error("end_step() lost the average");
    if (exchange->capture() == DeviceExchange::Capture::none) exchange->state();  // residuals to the GPU
    now.residual = residual_of(exchange->groups(), arena);
  }
  record.state = exchange->state();
  record.graphs = captured.size();
  return record;
}

class EchoCommunicator final : public cuda::DeviceCommunicator {
 public:
  explicit EchoCommunicator(std::size_t* calls) : calls_(calls) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string backend() const override { return "echo"; }
  bool capturable() const override { return true; }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    count();
    for (const std::size_t rank : {0, 1})
      TOPKNOT_CUDA(cudaMemcpyAsync(all + rank * bytes, mine, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  void all_reduce(float* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    count();
    cuda::add(stream, DType::f32, data, data, data, n);
  }
  void all_reduce_bfloat16(void* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    count();
    cuda::add(stream, DType::bf16, data, data, data, n);
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

}  // namespace

std::unique_ptr<cuda::DeviceCommunicator> echo_communicator(std::size_t* calls) {
  return std::make_unique<EchoCommunicator>(calls);
}

std::vector<ExchangeRecord> run_on_gpu(const ExchangePlan& plan, const MakeDeviceExchange& make,
                                       bool graphs) {
  std::vector<ExchangeRecord> records(static_cast<std::size_t>(plan.ranks));
  run_thread_ranks(plan.ranks, 60, [&](Communicator& communicator) {
    const OnGpu gpu;
    const auto device = cuda::make_device_communicator(communicator, 60);
    records[static_cast<std::size_t>(communicator.rank())] =
        run_rank(plan, communicator, *device, make, graphs);
  });
  return records;
}

ExchangeRecord run_echo(const ExchangePlan& plan, const MakeDeviceExchange& make, bool graphs) {
  const OnGpu gpu;
  const auto alone = make_thread_group(1, 60);
  std::size_t calls = 0;
  const auto device = echo_communicator(&calls);
  ExchangeRecord record = run_rank(plan, *alone[0], *device, make, graphs);
  record.collectives = calls;
  return record;
}

void check_same(const std::vector<ExchangeRecord>& gpu, const std::vector<ExchangeRecord>& cpu) {
  REQUIRE(gpu.size() == cpu.size());
  for (std::size_t rank = 0; rank < gpu.size(); ++rank) {
    REQUIRE(gpu[rank].steps.size() == cpu[rank].steps.size());
    for (std::size_t step = 0; step < gpu[rank].steps.size(); ++step) {
      const auto &ours = gpu[rank].steps[step], &theirs = cpu[rank].steps[step];
      INFO("rank " << rank << ", step " << step);
      REQUIRE(ours.committed == theirs.committed);
      CHECK(ours.bad_rank == theirs.bad_rank);
      if (theirs.committed) CHECK(ours.selected == theirs.selected);
      REQUIRE(same_bits(ours.average, theirs.average));
      REQUIRE(same_bits(ours.residual, theirs.residual));
    }
    CHECK(gpu[rank].state == cpu[rank].state);
  }
}

}  // namespace topknot::testing
