#pragma once
// Collectives on GPU memory. Calls put work on a stream and return; every rank makes the same calls in the same
// order on streams that run them in that order. Backends: NCCL (one process per rank), and threads of one process
// that share a GPU. The host's collectives (configuration, metrics, evaluation) stay with dist/comm/communicator.h.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "dist/comm/communicator.h"

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

  // The same `bytes` from every rank, to `all` in rank order. GPU memory, aligned to 16.
  virtual void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) = 0;
  // Sums in place, the same bits on every rank. SumOrder::ranks: ((g0 + g1) + g2) + ..., the same bits as every
  // other backend.
  virtual void all_reduce(float* data, std::size_t n, SumOrder order, cudaStream_t stream) = 0;
  // The same of bfloat16: added as floats; rounded as dist/comm/communicator.h says.
  virtual void all_reduce_bfloat16(void* data, std::size_t n, SumOrder order, cudaStream_t stream) = 0;
  virtual void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) = 0;

  // A communicator of the ranks of `host`, a split of the one that this was made over. Collective over them. This outlives
  // it, and ends where it does.
  virtual std::unique_ptr<DeviceCommunicator> split(Communicator& host) = 0;

  // Waits until the stream has run everything, at most dist.timeout_s; throws CollectiveError where a peer died
  // or gave up or did not come in time, CudaError where the GPU failed. The host waits nowhere else.
  virtual void wait(cudaStream_t stream) = 0;
  // A graph that holds calls of this was started on the stream: what is on it now is to end in time as well, also
  // where no wait() follows.
  virtual void launched(cudaStream_t) {}
  // Ends this rank's collectives, those on the GPU included, and lets the peers know where it can. Never throws;
  // from any thread. Afterwards every call throws.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Collective over `host`, on the current context's GPU: NCCL for a communicator of processes, kernels of our own
// for one of threads. `timeout_s` as dist.timeout_s. `host` must outlive it.
std::unique_ptr<DeviceCommunicator> make_device_communicator(Communicator& host, double timeout_s);

}  // namespace topknot::cuda
