#pragma once
// Collectives on GPU memory. Calls put work on a stream and return; every rank makes the same calls in the
// same order on streams that run them in that order. Backends: NCCL (one process per rank), and threads of
// one process that share a GPU. The host's collectives are in dist/comm/communicator.h.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "dist/comm/communicator.h"
#include "dist/comm/ordered_sum.h"
#include "nn/base/clock.h"
#include "nn/core/device.h"

namespace topknot::cuda {

// Graphs that hold its calls are destroyed before it: NCCL does not end while there is one.
class DeviceCommunicator {
 public:
  virtual ~DeviceCommunicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string backend() const = 0;  // "nccl", "threads"
  // Whether its calls can be captured in a graph together with what is before and after them.
  virtual bool capturable() const = 0;
  // Collective, before splits and captures. Records calls in a graph that is not launched; if that fails on
  // one rank, capturable() is false on all from now on, and rank 0 warns; if not `wanted`, without a trial.
  virtual void try_graphs([[maybe_unused]] bool wanted) {}

  // The same `bytes` from every rank, to `all` in rank order. GPU memory, aligned to 16.
  virtual void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) = 0;
  // Sums in place, the same bits on every rank. SumOrder::ranks: ((g0 + g1) + g2) + ..., the same bits as
  // every other backend. bfloat16 is added as floats, and rounded as dist/comm/communicator.h says.
  virtual void all_reduce(DType type, void* data, std::size_t n, SumOrder order, cudaStream_t stream) = 0;
  // all_gather() of `bytes`, and all_reduce() of `data` in rank order; over NCCL in one launch, which gathers `data` of
  // all ranks: for short arrays.
  virtual void all_gather_and_reduce(const std::byte* mine, std::byte* all, std::size_t bytes, float* data,
                                     std::size_t n, cudaStream_t stream) {
    all_gather(mine, all, bytes, stream);
    all_reduce(DType::f32, data, n, SumOrder::ranks, stream);
  }
  virtual void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) = 0;
  // The halves of all_reduce() in rank order, by slice_of(n, size(), r). The first leaves the sum in this rank's slice,
  // and anything in the others; the second sends every rank's slice to all.
  virtual void reduce_scatter(float* data, std::size_t n, cudaStream_t stream) {
    all_reduce(DType::f32, data, n, SumOrder::ranks, stream);
  }
  virtual void all_gather_slices(float* data, std::size_t n, cudaStream_t stream) {
    for (int r = 0; r < size(); ++r) {
      const ElementRange slice = slice_of(n, size(), r);
      broadcast(reinterpret_cast<std::byte*>(data + slice.begin), slice.size() * sizeof(float), r, stream);
    }
  }

  // A communicator of the ranks of `host`, a split of this one's. Collective over them. This outlives it.
  virtual std::unique_ptr<DeviceCommunicator> split(Communicator& host) = 0;

  // Waits until the stream has run everything, at most dist.timeout_s; throws CollectiveError if a peer died
  // or gave up or did not come in time, CudaError if the GPU failed. The host waits nowhere else.
  virtual void wait(cudaStream_t stream) = 0;
  // A graph with calls of this was started on the stream, which must end in time even without a wait().
  virtual void launched(cudaStream_t) {}
  // Ends this rank's collectives, those on the GPU included, and lets the peers know if it can. Never throws;
  // from any thread. Afterwards every call throws.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Collective over `host`, on the current context's GPU: NCCL for a communicator of processes, kernels of our
// own for one of threads. `timeout_s` as dist.timeout_s. `host` must outlive it.
std::unique_ptr<DeviceCommunicator> make_device_communicator(Communicator& host, double timeout_s);

// Ranks that are threads of this process on one GPU. They enter and leave each call by a barrier on the host,
// exchange pointers and events, and each rank's stream waits for the others' events: no kernel waits for
// another rank. Sums are in rank order, whatever SumOrder asks for: each rank adds one slice of every rank's
// memory and writes the sum to all of them. Collective; UserError for different GPUs or too many ranks.
std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& host, double timeout_s);

// Ranks that are processes, one per GPU, over NCCL. Collective over `host`: NCCL's versions are compared,
// then rank 0's unique id is broadcast. NCCL runs non-blocking, and a thread watches the work on its streams:
// at the deadline, at an asynchronous error and as soon as the host's group has ended it aborts, so that no
// kernel and no host call waits for a dead peer without end. UserError: versions that differ, ranks that
// share a GPU (unless NCCL_HOSTID sets them apart); CollectiveError: a peer did not come.
//
// SumOrder::ranks: slices go from all to all, each rank adds its slice of all ranks in rank order, and the
// sums are gathered; what 16 times the ranks do not divide, and short arrays, every rank gathers and adds.
std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& host, double timeout_s);

// Waits for a GPU without blocking in CUDA: sleeps between looks, about 5 % of what has passed, at most 2 ms.
class PollingWait {
 public:
  void pause() const {
    const auto passed = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start_);
    std::this_thread::sleep_for(
        std::clamp(passed / 20, std::chrono::microseconds(10), std::chrono::microseconds(2000)));
  }

 private:
  Clock::time_point start_ = Clock::now();
};

// For backends, in device_sum.cu: dist/comm/ordered_sum.h's sums, bit for bit, and copies between ranks.

// The same array of every rank, by rank.
inline constexpr int kMostThreadRanks = 128;
struct RankPointers {
  void* at[kMostThreadRanks] = {};
};

// Elements `begin` to `begin` + `count` of every rank's array, added in rank order, written to all of them.
// No other rank may read or write them meanwhile. bfloat16: added as floats and rounded once.
void ordered_sum_to_all(cudaStream_t stream, DType type, const RankPointers& arrays, int ranks,
                        std::size_t begin, std::size_t count);

// out[i] = blocks[0 * stride + i] + blocks[1 * stride + i] + ..., in that order; `out` is apart from them.
void ordered_sum_of_blocks(cudaStream_t stream, DType type, const void* blocks, std::size_t stride, int ranks,
                           void* out, std::size_t count);

// all[r * bytes ...] = the `bytes` at blocks.at[r]; a block that lies there already stays.
void gather_blocks(cudaStream_t stream, const RankPointers& blocks, int ranks, std::size_t bytes,
                   std::byte* all);

}  // namespace topknot::cuda
