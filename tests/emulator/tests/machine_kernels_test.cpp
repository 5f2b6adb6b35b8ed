// The CUDA emulator itself: blocks, warps and threads of a kernel.
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/child_process.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/emulator/topknot_kernel.h"

namespace topknot {
namespace {

using cuda::await_previous;
using cuda::launch;
using namespace testing;

constexpr int kBlock = 96;

// What `run` finds with threads in ascending and in descending order.
template <class Run>
auto in_both_orders(const Run& run) {
  struct Forwards {
    ~Forwards() { emulator::machine().reverse = false; }
  } forwards;
  const auto first = run();
  emulator::machine().reverse = true;
  return std::array{first, run()};
}

std::vector<int> counted(int n, int from = 0) {
  std::vector<int> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), from);
  return values;
}

// out[i] of a block: what the thread `by` further on wrote, all in a circle.
__global__ void pass_on(const int* in, int* out, int by, bool wait) {
  await_previous();
  __shared__ int tile[kBlock];
  const int at = int(threadIdx.x);
  tile[at] = -1;
  __syncthreads();
  tile[at] = in[blockIdx.x * kBlock + at];
  if (wait) __syncthreads();
  out[blockIdx.x * kBlock + at] = tile[(at + by + kBlock) % kBlock];
}

std::vector<int> passed_on(const OnGpu& gpu, int by, bool wait) {
  const DeviceVector<int> in(counted(2 * kBlock)), out(2 * kBlock);
  launch(pass_on, 2, kBlock, gpu.stream(), in.data(), out.data(), by, wait);
  return out.host();
}
std::vector<int> in_a_circle(int by) {
  std::vector<int> expected(2 * kBlock);
  for (int i = 0; i < 2 * kBlock; ++i)
    expected[i] = i / kBlock * kBlock + (i % kBlock + by + kBlock) % kBlock;
  return expected;
}

TEST_CASE("emulator: behind a barrier all see what all wrote; without one, an order of threads shows it") {
  const OnGpu gpu;
  for (const int by : {1, -1, 50}) {
    const std::vector<int> expected = in_a_circle(by);
    const auto with = in_both_orders([&] { return passed_on(gpu, by, true); });
    CHECK(with == std::array{expected, expected});
    const auto without = in_both_orders([&] { return passed_on(gpu, by, false); });
    CHECK((without[0] != expected || without[1] != expected));
  }
}

__global__ void any_of(const int* in, int* out) {
  await_previous();
  out[threadIdx.x] = __syncthreads_or(in[threadIdx.x]);
}

TEST_CASE("emulator: __syncthreads_or tells all whether one said yes") {
  const OnGpu gpu;
  for (const int yes : {-1, 0, 57, kBlock - 1}) {
    std::vector<int> said(kBlock);
    if (yes >= 0) said[std::size_t(yes)] = 4;
    const auto heard = in_both_orders([&] {
      const DeviceVector<int> in(said), out(kBlock);
      launch(any_of, 1, kBlock, gpu.stream(), in.data(), out.data());
      return out.host();
    });
    for (const auto& answers : heard)
      for (const int answer : answers) CHECK((answer != 0) == (yes >= 0));
  }
}

struct Lane {
  int number = -1, from_9 = -1, up = -1, flipped = -1;
  double up_wide = -1;
  bool operator==(const Lane&) const = default;
};

__global__ void exchange(Lane* out, unsigned mask) {
  await_previous();
  const int at = int(threadIdx.x), mine = 100 + at;
  Lane lane;
  lane.number = at % 32;
  lane.from_9 = __shfl_sync(mask, mine, 9);
  lane.up = __shfl_up_sync(mask, mine, 3);
  lane.flipped = __shfl_xor_sync(mask, mine, 6);
  lane.up_wide = __shfl_up_sync(mask, 0.5 + mine, 1);
  out[at] = lane;
}

TEST_CASE("emulator: shuffles bring each lane what another has; beyond the warp, its own") {
  const OnGpu gpu;
  const auto found = in_both_orders([&] {
    const DeviceVector<Lane> out(64);
    launch(exchange, 1, 64, gpu.stream(), out.data(), 0xffffffffu);
    return out.host();
  });
  for (const auto& lanes : found)
    for (int i = 0; i < 64; ++i) {
      const int l = i % 32, mine = 100 + i, first = mine - l;
      const double before = 0.5 + (l < 1 ? mine : mine - 1);
      CHECK(lanes[i] == Lane{l, first + 9, l < 3 ? mine : mine - 3, first + (l ^ 6), before});
    }
}

// Half a warp takes one branch, half the other; of 40 threads the second warp has eight lanes.
__global__ void vote(unsigned* ballots) {
  await_previous();
  const unsigned at = threadIdx.x, lane = at % 32;
  const unsigned present = at < 32 ? 0xffffffffu : 0xffu;
  if (lane < 4)
    ballots[at] = __ballot_sync(0xfu, lane % 2 == 0);
  else
    ballots[at] = __ballot_sync(present & ~0xfu, lane == 6);
}

TEST_CASE("emulator: votes count the lanes of their mask, in branches and in a warp that is not full") {
  const OnGpu gpu;
  const auto found = in_both_orders([&] {
    const DeviceVector<unsigned> ballots(40);
    launch(vote, 1, 40, gpu.stream(), ballots.data());
    return ballots.host();
  });
  for (const auto& ballots : found)
    for (std::size_t i = 0; i < 40; ++i) CHECK(ballots[i] == (i % 32 < 4 ? 5u : 64u));
}

__global__ void count(unsigned* words, unsigned* tickets, unsigned long long* wide, double* real) {
  await_previous();
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  tickets[at] = atomicAdd(&words[0], 1u);
  atomicMax(&words[1], at);
  atomicOr(&words[2], 1u << at % 32);
  atomicAdd(wide, 1ull << 33);
  atomicAdd(real, 0.5);
}

TEST_CASE("emulator: atomics lose nothing, and return what was there") {
  const OnGpu gpu;
  const auto found = in_both_orders([&] {
    const DeviceVector<unsigned> words(std::vector<unsigned>(3)), tickets(3 * kBlock);
    const DeviceVector<unsigned long long> wide(std::vector<unsigned long long>{0});
    const DeviceVector<double> real(std::vector<double>{0});
    launch(count, 3, kBlock, gpu.stream(), words.data(), tickets.data(), wide.data(), real.data());
    return std::tuple(words.host(), tickets.host(), wide.host()[0], real.host()[0]);
  });
  CHECK(std::get<1>(found[0]) != std::get<1>(found[1]));  // the orders are two
  for (auto [words, tickets, wide, real] : found) {
    CHECK(words == std::vector<unsigned>{3 * kBlock, 3 * kBlock - 1, ~0u});
    std::sort(tickets.begin(), tickets.end());
    for (unsigned i = 0; i < tickets.size(); ++i) CHECK(tickets[i] == i);
    CHECK(wide == 3ull * kBlock << 33);
    CHECK(real == 1.5 * kBlock);
  }
}

// Right only if no block comes between the two steps.
__global__ void count_in_two_steps(int* sum) {
  await_previous();
  const int before = atomicAdd(sum, 0);
  atomicMax(sum, before + 1);
}

TEST_CASE("emulator: interleaved blocks come between one another's steps; shared memory is each one's own") {
  const OnGpu gpu;
  const auto counted_blocks = [&] {
    const DeviceVector<int> sum(std::vector<int>{0});
    launch(count_in_two_steps, 300, 1, gpu.stream(), sum.data());
    return sum.host()[0];
  };
  CHECK(in_both_orders(counted_blocks) == std::array{300, 300});
  const emulator::Settings settings;
  for (unsigned seed = 1; seed <= 5; ++seed) {
    emulator::machine().interleave = seed;
    CHECK(passed_on(gpu, 1, true) == in_a_circle(1));
    const int sum = counted_blocks();
    CHECK(sum < 300);
    CHECK(counted_blocks() == sum);  // the seed's order
  }
}

__global__ void note_place(uint3* out) {
  await_previous();
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = {
      threadIdx.x + 10 * blockIdx.x, threadIdx.y + 10 * blockIdx.y, threadIdx.z + 10 * blockIdx.z};
}

TEST_CASE("emulator: every thread of every block of a grid of three dimensions runs once, in its place") {
  const OnGpu gpu;
  const dim3 grid{3, 2, 2}, block{4, 3, 2};
  for (const auto& places : in_both_orders([&] {
         const DeviceVector<uint3> out(12 * 24);
         launch(note_place, grid, block, gpu.stream(), out.data());
         return out.host();
       }))
    for (unsigned i = 0; i < places.size(); ++i) {
      const unsigned b = i / 24, t = i % 24;
      CHECK(places[i].x == t % 4 + 10 * (b % 3));
      CHECK(places[i].y == t / 4 % 3 + 10 * (b / 3 % 2));
      CHECK(places[i].z == t / 12 + 10 * (b / 6));
    }
}

// Kernels that a GPU would hang at, or that mean nothing there.
__global__ void leave_before_barrier(unsigned who) {
  await_previous();
  if (threadIdx.x == who) return;
  __syncthreads();
}
__global__ void part_at_barriers(unsigned who) {
  await_previous();
  if (threadIdx.x == who) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void leave_before_shuffle(unsigned who) {
  await_previous();
  if (threadIdx.x != who) __syncwarp();
}
__global__ void shuffle_without_me(unsigned who) {
  await_previous();
  if (threadIdx.x == who) __syncwarp(~(1u << who));
}
__global__ void part_at_shuffle(unsigned who) {
  await_previous();
  if (threadIdx.x == who)
    __syncthreads();
  else
    __syncwarp();
}
__global__ void together(unsigned) {
  await_previous();
  __syncwarp();
  __syncthreads();
}

TEST_CASE("emulator: a kernel whose threads part at a barrier ends the program") {
  const auto run = [](void (*kernel)(unsigned), unsigned who) {
    return run_in_child([=] {
      const OnGpu gpu;
      launch(kernel, 1, 32, gpu.stream(), who);
      cuda::Context::current().synchronize();
    });
  };
  for (const unsigned who : {0u, 5u, 31u}) {
    INFO("thread " << who);
    const auto dies_of = [&](void (*kernel)(unsigned), const char* reason) {
      const ChildEnd ended = run(kernel, who);
      return ended.aborted && says(ended.text, {"emulated GPU", reason});
    };
    CHECK(dies_of(leave_before_barrier, "has ended without the barrier"));
    CHECK(dies_of(part_at_barriers, "different barriers"));
    CHECK(dies_of(leave_before_shuffle, "a lane of the mask has ended"));
    CHECK(dies_of(shuffle_without_me, "a mask that leaves it out"));
    CHECK(dies_of(part_at_shuffle, "wait for others that wait for the block"));
    CHECK_FALSE(run(together, who).aborted);
  }
}

__global__ void await_but(unsigned who) {
  if (threadIdx.x != who) await_previous();
}

TEST_CASE("emulator: a thread that ends without await_previous() ends the program, which names its kernel") {
  for (const unsigned who : {0u, 31u, 32u}) {
    const ChildEnd ended = run_in_child([=] {
      const OnGpu gpu;
      launch(await_but, 2, 32, gpu.stream(), who);
      cuda::Context::current().synchronize();
    });
    if (who < 32)
      CHECK(says(ended.text, {"emulated GPU", "without await_previous()", "the kernel: ", "await_but"}));
    CHECK(ended.aborted == (who < 32));
  }
}

#ifndef __SANITIZE_ADDRESS__  // whose build says so itself
__global__ void read_four(const float* from, float* to, unsigned first) {
  await_previous();
  const float4 four = *reinterpret_cast<const float4*>(from + first);
  *to = four.x + four.w;
}

TEST_CASE("emulator: a vector that does not lie at a multiple of its size ends the program") {
  for (const unsigned first : {0u, 1u, 2u, 4u}) {
    const ChildEnd ended = run_in_child([=] {
      const OnGpu gpu;
      const DeviceVector<float> from(8), to(1);
      launch(read_four, 1, 1, gpu.stream(), from.data(), to.data(), first);
      cuda::Context::current().synchronize();
    });
    if (first % 4 == 0)
      CHECK_FALSE(ended.aborted);
    else
      CHECK(says(ended.text, {"emulated GPU: misaligned address", "float4", "machine_kernels_test.cpp"}));
  }
}
#endif

TEST_CASE("emulator: grids and blocks that no GPU takes are refused") {
  const OnGpu gpu;
  const auto start = [&](dim3 grid, dim3 block) {
    return error_text([&] { launch(together, grid, block, gpu.stream(), 0u); });
  };
  for (const auto& [grid, block] :
       {std::pair<dim3, dim3>{0, 32}, {1, 0}, {1, 1025}, {dim3(1, 65536), 1}, {1, dim3(1, 1, 65)}})
    CHECK(says(start(grid, block), {"cudaErrorInvalidConfiguration"}));
  CHECK(start({2, 3, 4}, 1024) == "");
  CHECK(says(error_text([] { launch(together, 1, 32, nullptr, 0u); }), {"cudaErrorInvalidResourceHandle"}));
}

}  // namespace
}  // namespace topknot
