#pragma once
// Ranks as threads of a test, each with a context of its own, on one GPU or on one each.

#include <span>
#include <vector>

#include "dist/comm/cuda/device_communicator.h"
#include "nn/core/cuda/context.h"
#include "tests/dist/ranks.h"

namespace topknot {

struct DeviceRank {
  Communicator& host;
  cuda::Context& context;
  cuda::DeviceCommunicator& device;
  int rank() const { return host.rank(); }
  int size() const { return host.size(); }
  cudaStream_t stream() const { return context.communication(); }
};

// What each rank threw, "" where nothing. `make`: make_device_threads (all on GPU 0) or make_nccl_communicator (rank
// r on GPU r).
using MakeDevice = std::unique_ptr<cuda::DeviceCommunicator> (*)(Communicator&, double);
inline std::vector<std::string> errors_of_device_ranks(MakeDevice make, int ranks,
                                                       const std::function<void(DeviceRank&)>& body,
                                                       double timeout_s = 60) {
  return errors_of_ranks("threads", ranks,
                         [&](Communicator& host) {
                           cuda::Context context({make == cuda::make_device_threads ? 0 : host.rank(),
                                                  host.rank(), cuda::Precision::fp32, true});
                           const cuda::Context::Use use(context);
                           const auto device = make(host, timeout_s);
                           DeviceRank rank{host, context, *device};
                           body(rank);
                           // Others' work may still use this rank's memory and events.
                           device->wait(rank.stream());
                           context.synchronize();
                         },
                         {timeout_s});
}

inline void run_device_ranks(MakeDevice make, int ranks, const std::function<void(DeviceRank&)>& body) {
  for (const auto& error : errors_of_device_ranks(make, ranks, body))
    if (!error.empty()) throw std::runtime_error(error);
}

// Bytes or numbers in GPU memory, copied on a stream and never waited for. `values` must stay as they are until the
// stream has come to the copy.
template <class T>
void to_gpu(std::span<const T> values, T* to, cudaStream_t stream) {
  TOPKNOT_CUDA(cudaMemcpyAsync(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream));
}
template <class T>
void from_gpu(const T* from, std::span<T> values, cudaStream_t stream) {
  TOPKNOT_CUDA(cudaMemcpyAsync(values.data(), from, values.size_bytes(), cudaMemcpyDeviceToHost, stream));
}

}  // namespace topknot
