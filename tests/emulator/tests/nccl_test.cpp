// The NCCL communicator over an emulated NCCL: what it sums, and how it ends.
#include <nccl.h>

#include <csignal>

#include "dist/rendezvous/socket.h"
#include "nn/base/program.h"
#include "nn/core/cuda/pool.h"
#include "tests/cuda/device_collectives.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/nccl_emulator.h"
#include "tests/support/standard_error.h"

namespace topknot {
namespace {

using namespace testing;

constexpr auto kMake = &cuda::make_nccl_communicator;

// Eight GPUs, and a look at the end that every rank has given its communicator back.
struct NcclMachine {
  NcclMachine() { emulator::machine().devices = 8; }
  ~NcclMachine() {
    CHECK(emulator::nccl_communicators() == 0);
    emulator::reset();
    emulator::set_nccl_version(NCCL_VERSION_CODE);
  }
};

// What each rank of a fresh machine threw, within `seconds`; `data`: 64 elements of its own.
using Body = std::function<void(DeviceRank& rank, float* data)>;
std::vector<std::string> errors_of(int ranks, double timeout_s, double seconds, const Body& body,
                                   MakeDevice make = kMake) {
  const NcclMachine machine;
  const auto start = Clock::now();
  const auto errors = errors_of_device_ranks(
      make, ranks,
      [&](DeviceRank& rank) {
        const cuda::DeviceArray<float> data(64);
        body(rank, data.data());
      },
      timeout_s);
  CHECK(std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  return errors;
}
bool all_say(const std::vector<std::string>& errors, std::initializer_list<std::string> parts) {
  return std::ranges::all_of(errors, [&](const std::string& error) { return says(error, parts); });
}
void sum(DeviceRank& rank, float* data, SumOrder order = SumOrder::library) {
  rank.device.all_reduce(DType::f32, data, 64, order, rank.stream());
}

// Stays away from the others' collective until they have given up.
void stay_away(DeviceRank& rank) {
  const Deadline deadline = deadline_in(30);
  while (rank.host.first_error().empty() && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  throw Error("was away");
}

TEST_CASE("nccl: sums in rank order are the host's bit for bit, any ranks and lengths") {
  const NcclMachine machine;
  const std::array<std::size_t, 5> lengths{1, 17, 1000, 8193, 8500};
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    INFO(ranks << " ranks");
    emulator::machine().reverse = ranks % 2 == 0;  // blocks and threads the other way round
    CHECK(wrong_sum<float>(kMake, ranks, lengths) == -1);
    CHECK(wrong_sum<BFloat16>(kMake, ranks, lengths) == -1);
  }
}

TEST_CASE("nccl: blocks of any length are gathered and broadcast") {
  const NcclMachine machine;
  for (const int ranks : {1, 2, 5})
    for (const std::size_t bytes : {0, 1, 63, 1024}) CHECK(gathers_and_broadcasts(kMake, ranks, bytes));
}

TEST_CASE("nccl: memory may be filled anew right after a call, fifty times in a row") {
  const NcclMachine machine;
  CHECK(wrong_round<float>(kMake, 2, 333) == -1);
  CHECK(wrong_round<float>(kMake, 5, 129) == -1);
  CHECK(wrong_round<BFloat16>(kMake, 4, 128) == -1);
  CHECK(wrong_round<float>(kMake, 2, 8193) == -1);
}

TEST_CASE("nccl: the library's sums are right, and the same on every rank") {
  const NcclMachine machine;
  constexpr int ranks = 4;
  constexpr std::size_t n = 100;
  std::vector<std::vector<float>> sums(ranks, std::vector<float>(n));
  run_device_ranks(kMake, ranks, [&](DeviceRank& rank) {
    std::vector<float> mine(n);
    for (std::size_t i = 0; i < n; ++i) mine[i] = float((rank.rank() + 1) * 100 + int(i));
    const cuda::DeviceArray<float> memory(n);
    rank.context.synchronize();
    to_gpu<float>(mine, memory.data(), rank.stream());
    rank.device.all_reduce(DType::f32, memory.data(), n, SumOrder::library, rank.stream());
    from_gpu<float>(memory.data(), sums[std::size_t(rank.rank())], rank.stream());
    rank.device.wait(rank.stream());
  });
  for (const auto& sum : sums)
    for (std::size_t i = 0; i < n; ++i) CHECK(sum[i] == float(1000 + 4 * i));
}

TEST_CASE("nccl: where one rank's NCCL refuses calls in a graph, all ranks start anew and keep them out") {
  const NcclMachine machine;
  constexpr int ranks = 3;
  constexpr std::size_t n = 9000;
  const std::vector<float> ones(n, 1.0f);
  for (const bool wanted : {true, false})
    for (const bool refused : {false, true}) {
      if (refused) emulator::fail("NCCL in a graph of rank 1", ncclUnhandledCudaError);
      std::vector<int> capturable(ranks);
      std::vector<std::vector<float>> sums(ranks, std::vector<float>(n));
      const int aborts = emulator::nccl_aborts();
      const StandardError written;
      run_device_ranks(kMake, ranks, [&](DeviceRank& rank) {
        const auto r = std::size_t(rank.rank());
        rank.device.try_graphs(wanted);
        capturable[r] = rank.device.capturable();
        const cuda::DeviceArray<float> memory(n);
        rank.context.synchronize();
        to_gpu<float>(ones, memory.data(), rank.stream());
        rank.device.all_reduce(DType::f32, memory.data(), n, SumOrder::ranks, rank.stream());
        from_gpu<float>(memory.data(), sums[r], rank.stream());
        rank.device.wait(rank.stream());
      });
      CHECK(capturable == std::vector(ranks, wanted && !refused ? 1 : 0));
      for (const auto& sum : sums) CHECK(sum == std::vector<float>(n, 3.0f));
      const std::string text = written.text();
      if (wanted && refused)
        CHECK((says(text, {"on rank 1: ", "unhandled cuda error", "train.graphs=parts"}) &&
               std::count(text.begin(), text.end(), '\n') == 1));
      else
        CHECK(text.empty());
      CHECK(emulator::nccl_aborts() - aborts == (wanted && refused ? ranks : 0));
      emulator::reset();
      emulator::machine().devices = 8;
    }
}

// Two ranks of one thread, each with a GPU, a stream, and what it sends.
struct Pair {
  Pair() {
    ncclUniqueId id;
    REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    for (int r = 0; r < 2; ++r) {
      TOPKNOT_CUDA(cudaSetDevice(r));
      REQUIRE(ncclCommInitRankConfig(&comm[r], 2, id, r, &config) == ncclInProgress);
      for (cudaStream_t* stream : {&streams[r], &others[r]})
        TOPKNOT_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
      TOPKNOT_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory[r]), 3 * sizeof(float)));
      set(r, float(r + 1));
    }
  }
  ~Pair() {
    for (int r = 0; r < 2; ++r) {
      cudaSetDevice(r);
      ncclCommDestroy(comm[r]);
      cudaFree(memory[r]);
      for (cudaStream_t stream : {streams[r], others[r]}) cudaStreamDestroy(stream);
    }
    cudaSetDevice(0);
  }
  // On another stream than the collective's.
  void set(int r, float value) {
    TOPKNOT_CUDA(cudaMemcpyAsync(memory[r], &value, sizeof value, cudaMemcpyHostToDevice, others[r]));
    TOPKNOT_CUDA(cudaStreamSynchronize(others[r]));
  }
  std::array<float, 2> gathered(int r) {
    std::array<float, 2> values{};
    TOPKNOT_CUDA(
        cudaMemcpyAsync(values.data(), memory[r] + 1, sizeof values, cudaMemcpyDeviceToHost, others[r]));
    TOPKNOT_CUDA(cudaStreamSynchronize(others[r]));
    return values;
  }
  void gather(int r) {
    REQUIRE(ncclAllGather(memory[r], memory[r] + 1, 1, ncclFloat32, comm[r], streams[r]) == ncclInProgress);
  }

  const NcclMachine machine;
  ncclComm_t comm[2];
  cudaStream_t streams[2], others[2];
  float* memory[2];  // what it sends, and what it gets
};

TEST_CASE("nccl, emulated: memory is the collective's from the stream's turn until every rank has come") {
  Pair pair;
  const bool reverse = GENERATE(false, true);
  emulator::machine().reverse = reverse;
  pair.gather(0);
  pair.set(0, 3);  // its turn has not come
  CHECK(cudaStreamQuery(pair.streams[0]) == cudaErrorNotReady);
  for (const float value : pair.gathered(0)) CHECK(std::isnan(value));
  pair.set(0, 4);  // a mistake: the one is read or the other
  pair.gather(1);
  REQUIRE(cudaStreamSynchronize(pair.streams[1]) == cudaSuccess);
  for (const int r : {0, 1}) CHECK(pair.gathered(r) == std::array<float, 2>{reverse ? 3.0f : 4.0f, 2});
  CHECK(cudaStreamSynchronize(pair.streams[0]) == cudaSuccess);
}

TEST_CASE("nccl: calls are captured in a graph, which sums anew at each launch") {
  const NcclMachine machine;
  constexpr int ranks = 3;
  constexpr std::size_t n = 9000;
  std::vector<std::vector<float>> sums(ranks, std::vector<float>(n));
  run_device_ranks(kMake, ranks, [&](DeviceRank& rank) {
    const cuda::DeviceArray<float> memory(n);
    rank.context.synchronize();
    const auto stream = rank.stream();
    rank.device.all_reduce(DType::f32, memory.data(), n, SumOrder::ranks,
                           stream);  // has its memory from now on
    rank.device.wait(stream);
    cuda::GraphMemory graph_memory(rank.context.pool());
    const cuda::Graph graph(stream, graph_memory, [&] {
      for (int i = 0; i < 2; ++i)
        rank.device.all_reduce(DType::f32, memory.data(), n, SumOrder::ranks, stream);
    });
    const std::vector<float> ones(n, 1.0f);
    to_gpu<float>(ones, memory.data(), stream);
    for (int i = 0; i < 3; ++i) graph.launch(stream);
    from_gpu<float>(memory.data(), sums[std::size_t(rank.rank())], stream);
    rank.device.wait(stream);
  });
  for (const auto& sum : sums) CHECK(sum == std::vector<float>(n, 729.0f));
}

TEST_CASE("nccl: a block is gathered and a short array summed in rank order in one launch") {
  const NcclMachine machine;
  constexpr int ranks = 3;
  constexpr std::size_t n = 1000, bytes = 48;
  const std::vector<float> expected = ordered_sum_of_ranks<float>(ranks, 0, n);
  std::vector<char> right(ranks);
  run_device_ranks(kMake, ranks, [&](DeviceRank& rank) {
    const auto stream = rank.stream();
    const std::vector<float> mine = rough_values<float>(rank.rank(), 0, n);
    const std::vector<std::byte> block(bytes, std::byte(rank.rank()));
    const cuda::DeviceArray<float> memory(n);
    const cuda::DeviceArray<std::byte> own(bytes), all(ranks * bytes);
    const auto both = [&] {
      rank.device.all_gather_and_reduce(own.data(), all.data(), bytes, memory.data(), n, stream);
    };
    both();  // has its memory from now on
    rank.device.wait(stream);
    cuda::GraphMemory graph_memory(rank.context.pool());
    const cuda::Graph graph(stream, graph_memory, both);
    to_gpu<float>(mine, memory.data(), stream);
    to_gpu<std::byte>(block, own.data(), stream);
    graph.launch(stream);
    std::vector<float> sum(n);
    std::vector<std::byte> blocks(ranks * bytes);
    from_gpu<float>(memory.data(), sum, stream);
    from_gpu<std::byte>(all.data(), blocks, stream);
    rank.device.wait(stream);
    bool same = same_bits(sum, expected);
    for (std::size_t i = 0; i < blocks.size(); ++i) same = same && blocks[i] == std::byte(i / bytes);
    right[std::size_t(rank.rank())] = same;
  });
  for (const char same : right) CHECK(same == 1);
  CHECK(emulator::counts().graph_nodes == 2);  // NCCL's kernel, and the sum's
}

TEST_CASE("nccl: versions that differ are one message on every rank, with both ranks and versions") {
  const auto errors = errors_of(
      3, 20, 10, [](DeviceRank&, float*) {},
      [](Communicator& host, double timeout_s) {
        if (host.rank() == 2) emulator::set_nccl_version(22403);
        return kMake(host, timeout_s);
      });
  CHECK(all_say(errors, {"version of NCCL", "rank 0 has '2.28.9'", "rank 2 has '2.24.3'"}));
}

TEST_CASE("nccl: two ranks on one GPU are refused on every rank") {
  const NcclMachine machine;
  const auto errors = errors_of_ranks("threads", 3, [](Communicator& host) {
    cuda::Context context({host.rank() == 2 ? 1 : 0, host.rank(), cuda::Precision::fp32, true});
    const cuda::Context::Use use(context);
    kMake(host, 20);
  });
  for (const auto& error : errors) CHECK(says(error, {"ranks 0 and 1 are on the same GPU", "0000:01:00.0"}));
}

TEST_CASE("nccl: a start that fails or never ends is an error on every rank, within the deadline") {
  for (const bool fails : {true, false}) {
    const NcclMachine machine;
    if (fails)
      emulator::fail("ncclCommInitRankConfig", ncclSystemError);
    else
      emulator::fail("ncclCommGetAsyncError", ncclInProgress);
    const auto errors = errors_of(3, 0.5, 10, [](DeviceRank&, float*) {});
    CHECK(all_say(
        errors, {"NCCL's start with 3 ranks", fails ? "unhandled system error" : "dist.timeout_s (0.5 s)"}));
  }
}

TEST_CASE("nccl: a peer that never comes to a collective ends all at the deadline") {
  const NcclMachine machine;
  const int aborts = emulator::nccl_aborts();
  const auto errors = errors_of(3, 0.6, 10, [](DeviceRank& rank, float* data) {
    sum(rank, data);
    if (rank.rank() == 2) stay_away(rank);
    sum(rank, data);
    rank.device.wait(rank.stream());
  });
  for (const int r : {0, 1})
    CHECK(says(errors[r], {"rank " + std::to_string(r), "all_reduce #2 of 256 bytes over NCCL"}));
  CHECK((errors[0] + errors[1]).find("gave up after dist.timeout_s (0.6 s)") != std::string::npos);
  CHECK(says(errors[2], {"was away"}));
  CHECK(emulator::nccl_aborts() == aborts + 3);  // once per rank
}

TEST_CASE("nccl: a stop signal ends a collective to which a peer never comes, without a deadline") {
  const auto patience = std::exchange(StopGracePeriod::alive, std::chrono::milliseconds(300));
  install_stop_handlers();
  const auto errors = errors_of(2, 0, 20, [](DeviceRank& rank, float* data) {
    if (rank.rank() == 1) {
      std::raise(SIGTERM);
      stay_away(rank);
    }
    sum(rank, data);
    rank.device.wait(rank.stream());
  });
  install_stop_handlers();  // forgets the signal
  StopGracePeriod::alive = patience;
  CHECK(says(errors[0], {"rank 0", "all_reduce #1 of 256 bytes over NCCL stopped by SIGTERM"}));
}

TEST_CASE("nccl: a peer that gives up ends all at once, with its reason") {
  const auto errors = errors_of(3, 60, 20, [](DeviceRank& rank, float* data) {
    if (rank.rank() == 1) throw Error("the disk is full");
    sum(rank, data, SumOrder::ranks);
    rank.device.wait(rank.stream());
  });
  CHECK(all_say(errors, {"the disk is full"}));
}

TEST_CASE("nccl: over gloo, a rank that dies ends the others' collectives with what the store knows") {
  const NcclMachine machine;
  const auto start = Clock::now();
  const auto errors = errors_of_ranks("gloo", 3, {60}, [](Communicator& host) {
    cuda::Context context({host.rank(), host.rank(), cuda::Precision::fp32, true});
    const cuda::Context::Use use(context);
    const auto device = kMake(host, 60);
    const cuda::DeviceArray<float> data(64);
    device->all_reduce(DType::f32, data.data(), 64, SumOrder::ranks, context.communication());
    device->wait(context.communication());
    if (host.rank() == 1) throw Error("the disk is full");
    device->all_reduce(DType::f32, data.data(), 64, SumOrder::ranks, context.communication());
    device->wait(context.communication());
  });
  for (const auto& error : errors) CHECK(says(error, {"the disk is full"}));
  CHECK(Clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("nccl: an asynchronous error ends all") {
  const auto errors = errors_of(2, 60, 20, [](DeviceRank& rank, float* data) {
    sum(rank, data, SumOrder::ranks);
    rank.device.wait(rank.stream());
    rank.host.barrier();
    if (rank.rank() == 0) emulator::fail("ncclCommGetAsyncError", ncclRemoteError);
    rank.host.barrier();
    sum(rank, data, SumOrder::ranks);
    rank.device.wait(rank.stream());
  });
  CHECK(all_say(errors, {"remote process exited"}));
}

TEST_CASE("nccl: an error among some of the ranks ends all, whoever waits for whom") {
  const auto errors = errors_of(4, 60, 20, [](DeviceRank& rank, float* data) {
    const auto host = rank.host.split(rank.rank() / 2);
    const auto part = rank.device.split(*host);
    part->all_reduce(DType::f32, data, 64, SumOrder::ranks, rank.stream());
    rank.device.wait(rank.stream());
    rank.host.barrier();
    if (rank.rank() == 0)
      part->abort("the disk is full");  // as its watch does; nothing is left that rank 0 would wait for
    else
      sum(rank, data, SumOrder::ranks);
    rank.device.wait(rank.stream());
  });
  CHECK(all_say(errors, {"the disk is full"}));
}

TEST_CASE("nccl: a host that is blocked in a call of CUDA is freed at the deadline") {
  const auto errors = errors_of(2, 0.6, 10, [](DeviceRank& rank, float* data) {
    if (rank.rank() == 1) stay_away(rank);
    sum(rank, data);
    TOPKNOT_CUDA(cudaStreamSynchronize(rank.stream()));  // waits for rank 1, who never comes
    sum(rank, data);
  });
  CHECK(says(errors[0], {"all_reduce #1 of 256 bytes", "gave up after dist.timeout_s (0.6 s)"}));
}

TEST_CASE("nccl: a graph whose collectives do not end is given up at the deadline") {
  const auto errors = errors_of(2, 0.6, 10, [](DeviceRank& rank, float* data) {
    const auto stream = rank.stream();
    rank.context.synchronize();
    TOPKNOT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    sum(rank, data);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    TOPKNOT_CUDA(cudaStreamEndCapture(stream, &graph));
    TOPKNOT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    cudaGraphDestroy(graph);
    if (rank.rank() == 0) {
      TOPKNOT_CUDA(cudaGraphLaunch(executable, stream));
      rank.device.launched(stream);
      cudaStreamSynchronize(stream);
    }
    cudaGraphExecDestroy(executable);
    if (rank.rank() == 1) stay_away(rank);
    rank.device.wait(stream);
  });
  CHECK(says(errors[0], {"a graph with collectives", "gave up after dist.timeout_s (0.6 s)"}));
}

TEST_CASE("nccl: steps that wait for one another may take longer than the deadline together") {
  const auto start = Clock::now();
  const auto errors = errors_of(1, 0.6, 60, [&](DeviceRank& rank, float*) {
    for (int step = 1; step <= 4; ++step) {
      emulator::enqueue_when(rank.stream(), [&start, step] {
        return Clock::now() >= start + step * std::chrono::milliseconds(400);
      });
      rank.device.launched(rank.stream());
    }
    rank.device.wait(rank.stream());
  });
  CHECK(errors[0].empty());
}

TEST_CASE("nccl: a rank gives up, and ends, while it still has graphs with collectives") {
  const auto errors = errors_of(2, 0.6, 10, [](DeviceRank& rank, float* data) {
    const auto stream = rank.stream();
    rank.context.synchronize();
    cuda::GraphMemory memory(rank.context.pool());
    const cuda::Graph graph(stream, memory, [&] { sum(rank, data); });
    graph.launch(stream);
    rank.device.wait(stream);
    if (rank.rank() == 1) stay_away(rank);
    graph.launch(stream);
    rank.device.wait(stream);  // finds that nobody comes, and gives up here
  });
  CHECK(says(errors[0], {"waiting for the GPU", "gave up after dist.timeout_s (0.6 s)"}));
  CHECK(says(errors[1], {"was away"}));
}

TEST_CASE("nccl: a lost GPU ends all") {
  const auto errors = errors_of(2, 5, 10, [](DeviceRank& rank, float* data) {
    sum(rank, data);
    rank.device.wait(rank.stream());
    rank.host.barrier();
    if (rank.rank() == 0) emulator::lose_device();
    rank.device.wait(rank.stream());
    sum(rank, data);
    rank.device.wait(rank.stream());
  });
  CHECK((errors[0] + errors[1]).find("the GPU is lost") != std::string::npos);
  for (const auto& error : errors) CHECK_FALSE(error.empty());
}

}  // namespace
}  // namespace topknot
