// What watches for races between a kernel's threads, on kernels that have one and on kernels that have none.
#include "tests/emulator/races.h"

#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/emulator/topknot_kernel.h"

namespace topknot {
namespace {

using cuda::await_previous;
using cuda::launch;
using testing::DeviceVector;

constexpr unsigned kBlock = 64;

enum class Order { none, shuffle, half_warps, warp, block };

template <Order kOrder>
__device__ void order() {
  if (kOrder == Order::shuffle) __shfl_sync(0xffffffffu, 1, 0);
  if (kOrder == Order::half_warps) __syncwarp(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u);
  if (kOrder == Order::warp) __syncwarp();
  if (kOrder == Order::block) __syncthreads();
}

// Whether one of what was found says all this.
bool found(const std::initializer_list<const char*>& parts) {
  const std::vector<std::string> races = emulator::races::take();
  return std::any_of(races.begin(), races.end(), [&](const std::string& race) {
    return std::all_of(parts.begin(), parts.end(), [&](const char* part) { return contains(race, part); });
  });
}

// Each reads what the thread `by` further on has written.
template <Order kOrder, class T>
__global__ void pass_on(T* out, unsigned by) {
  await_previous();
  __shared__ T tile[kBlock];
  const unsigned at = threadIdx.x;
  tile[at] = static_cast<T>(at);
  order<kOrder>();
  out[blockIdx.x * kBlock + at] = tile[(at + by) % kBlock];
}

template <Order kOrder, class T = int>
std::vector<std::string> races_of_passing_on(unsigned by) {
  const OnGpu gpu;
  const DeviceVector<T> out(2 * kBlock);
  launch(pass_on<kOrder, T>, 2, kBlock, gpu.stream(), out.data(), by);
  out.host();
  return emulator::races::take();
}

TEST_CASE("races: a block is ordered by __syncthreads") {
  CHECK_FALSE(races_of_passing_on<Order::none>(1).empty());
  CHECK(races_of_passing_on<Order::none>(0).empty());
  CHECK(races_of_passing_on<Order::block>(1).empty());
  CHECK(races_of_passing_on<Order::block>(40).empty());
  CHECK(races_of_passing_on<Order::block, char>(1).empty());
  CHECK(races_of_passing_on<Order::none, char>(0).empty());
  CHECK_FALSE(races_of_passing_on<Order::none, char>(1).empty());
}

// Lane l and lane l ^ flip.
template <Order kOrder>
__global__ void swap(int* out, unsigned flip) {
  await_previous();
  __shared__ int tile[kBlock];
  const unsigned at = threadIdx.x;
  tile[at] = int(at);
  order<kOrder>();
  out[at] = tile[at ^ flip];
}

template <Order kOrder>
std::vector<std::string> races_of_swapping(unsigned flip) {
  const OnGpu gpu;
  const DeviceVector<int> out(kBlock);
  launch(swap<kOrder>, 1, kBlock, gpu.stream(), out.data(), flip);
  out.host();
  return emulator::races::take();
}

TEST_CASE("races: a warp is ordered by __syncwarp, of those lanes, and by no shuffle") {
  CHECK_FALSE(races_of_swapping<Order::none>(1).empty());
  CHECK_FALSE(races_of_swapping<Order::shuffle>(1).empty());
  CHECK(races_of_swapping<Order::half_warps>(8).empty());
  CHECK_FALSE(races_of_swapping<Order::half_warps>(16).empty());
  CHECK(races_of_swapping<Order::warp>(16).empty());
  CHECK_FALSE(races_of_swapping<Order::warp>(32).empty());
  CHECK(races_of_swapping<Order::block>(32).empty());
}

// A loop whose second barrier is missing.
template <bool kWait>
__global__ void overwrite(int* out) {
  await_previous();
  __shared__ int first;
  for (unsigned i = 0; i < 3; ++i) {
    if (threadIdx.x == i) first = int(i);
    __syncthreads();
    out[threadIdx.x] = first;
    if (kWait) __syncthreads();
  }
}

TEST_CASE("races: a write may come too soon after others' reads") {
  const OnGpu gpu;
  const DeviceVector<int> out(kBlock);
  launch(overwrite<true>, 1, kBlock, gpu.stream(), out.data());
  out.host();
  CHECK(emulator::races::take().empty());
  launch(overwrite<false>, 1, kBlock, gpu.stream(), out.data());
  out.host();
  CHECK(found({"a write after a read"}));
}

// The last block adds what all have written.
template <bool kRelease, bool kAcquire, bool kWait>
__global__ void add_in_last_block(int* parts, unsigned* done, int* sum) {
  await_previous();
  if (threadIdx.x == (kWait ? 1 : 0)) parts[blockIdx.x] = int(blockIdx.x);
  if (kWait) __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    if (kRelease) __threadfence();
    last = atomicAdd(done, 1u) == gridDim.x - 1;
    if (kAcquire) __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x != 2) return;
  *sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) *sum += parts[b];
  *done = 0;
}

template <bool kRelease, bool kAcquire, bool kWait>
std::vector<std::string> races_of_last_block() {
  const OnGpu gpu;
  const DeviceVector<int> parts(5), sum(1);
  const DeviceVector<unsigned> done(std::vector<unsigned>{0});
  launch(add_in_last_block<kRelease, kAcquire, kWait>, 5, kBlock, gpu.stream(), parts.data(), done.data(),
         sum.data());
  CHECK(sum.host()[0] == 10);
  return emulator::races::take();
}

TEST_CASE("races: the last block sees the others' writes by a fence before and after its counter") {
  const emulator::Settings settings;
  emulator::machine().interleave = GENERATE(0u, 1u, 2u, 3u);
  CHECK(races_of_last_block<true, true, false>().empty());
  CHECK(races_of_last_block<true, true, true>().empty());
  CHECK_FALSE(races_of_last_block<false, true, false>().empty());
  CHECK_FALSE(races_of_last_block<true, false, false>().empty());
  CHECK_FALSE(races_of_last_block<true, false, true>().empty());
}

// Counts, and what the last to count reads.
template <bool kPlain>
__global__ void count(unsigned* counts, unsigned* seen) {
  await_previous();
  atomicAdd(&counts[threadIdx.x % 3], 1u);
  atomicMax(&counts[3], threadIdx.x);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kBlock - 1)
    *seen = kPlain ? counts[3] : atomicAdd(&counts[3], 0u);
}

TEST_CASE("races: atomic operations do not race with one another, but with plain accesses") {
  const OnGpu gpu;
  const DeviceVector<unsigned> counts(std::vector<unsigned>(4)), seen(1);
  launch(count<false>, 3, kBlock, gpu.stream(), counts.data(), seen.data());
  counts.host();
  CHECK(emulator::races::take().empty());
  launch(count<true>, 3, kBlock, gpu.stream(), counts.data(), seen.data());
  counts.host();
  CHECK(found({"a read after an atomic operation"}));
}

// Blocks that write the same place, or neighbours.
__global__ void write_by_block(std::uint8_t* out, unsigned stride) {
  await_previous();
  if (threadIdx.x == 0) out[blockIdx.x * stride] = 1;
}

TEST_CASE("races: blocks have no order, and bytes are apart") {
  const OnGpu gpu;
  const DeviceVector<std::uint8_t> out(3);
  launch(write_by_block, 3, kBlock, gpu.stream(), out.data(), 1u);
  launch(write_by_block, 1, kBlock, gpu.stream(), out.data(), 1u);
  out.host();
  CHECK(emulator::races::take().empty());
  launch(write_by_block, 3, kBlock, gpu.stream(), out.data(), 0u);
  out.host();
  CHECK(found({"a write after a write"}));
}

__global__ void read_half(int* out) {
  await_previous();
  __shared__ int tile[kBlock];
  if (threadIdx.x < 32) tile[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x < 33 || blockIdx.x == 1) out[threadIdx.x] = tile[threadIdx.x];
}

TEST_CASE("races: shared memory that the block has not written is not to be read") {
  const OnGpu gpu;
  const DeviceVector<int> out(kBlock);
  launch(read_half, 1, 32, gpu.stream(), out.data());
  out.host();
  CHECK(emulator::races::take().empty());
  launch(read_half, 1, kBlock, gpu.stream(), out.data());
  out.host();
  CHECK(found({"a read of what nothing has written"}));
}

// A tile that is fetched while the one before it is read.
template <bool kWait>
__global__ void fetch(const float4* from, float4* to) {
  await_previous();
  __shared__ float4 tile[kBlock];
  for (unsigned i = 0; i < 2; ++i) {
    if (kWait) __syncthreads();
    cuda::begin_copy(&tile[threadIdx.x], from + i * kBlock + threadIdx.x, true);
    cuda::close_copies();
    cuda::await_copies<0>();
    __syncthreads();
    to[i * kBlock + threadIdx.x] = tile[kBlock - 1 - threadIdx.x];
  }
}

TEST_CASE("races: a copy in the background writes from its begin on") {
  const OnGpu gpu;
  const DeviceVector<float4> from(2 * kBlock), to(2 * kBlock);
  launch(fetch<true>, 1, kBlock, gpu.stream(), from.data(), to.data());
  to.host();
  CHECK(emulator::races::take().empty());
  launch(fetch<false>, 1, kBlock, gpu.stream(), from.data(), to.data());
  to.host();
  CHECK(found({"a write after a read"}));
}

// What a kernel does ahead of its wait.
enum class Ahead { shared, read, write, atomic };

template <Ahead kAhead>
__global__ void begin_early(int* out) {
  __shared__ int tile[kBlock];
  if (kAhead == Ahead::shared) tile[threadIdx.x] = 1;
  if (kAhead == Ahead::read) tile[threadIdx.x] = out[threadIdx.x];
  if (kAhead == Ahead::write) out[threadIdx.x] = 1;
  if (kAhead == Ahead::atomic) atomicAdd(out, 1);
  await_previous();
  if (kAhead == Ahead::shared || kAhead == Ahead::read) out[threadIdx.x] = tile[threadIdx.x];
}

template <Ahead kAhead>
bool begins_too_early() {
  const OnGpu gpu;
  const DeviceVector<int> out(std::vector<int>(kBlock, 0));
  launch(begin_early<kAhead>, 1, kBlock, gpu.stream(), out.data());
  out.host();
  return found({"before await_previous()", "device memory", "the kernel: ", "begin_early"});
}

TEST_CASE("races: a kernel comes to global memory after await_previous() only, to shared memory before too") {
  CHECK_FALSE(begins_too_early<Ahead::shared>());
  CHECK(begins_too_early<Ahead::read>());
  CHECK(begins_too_early<Ahead::write>());
  CHECK(begins_too_early<Ahead::atomic>());
}

TEST_CASE("races: a report names the kernel and both places") {
  const OnGpu gpu;
  const DeviceVector<int> out(kBlock);
  launch(overwrite<false>, 1, kBlock, gpu.stream(), out.data());
  out.host();
  CHECK(found({"shared memory", "the kernel: ", "overwrite", "here: ", "before: ", "races_test.cpp:"}));
}

}  // namespace
}  // namespace topknot
