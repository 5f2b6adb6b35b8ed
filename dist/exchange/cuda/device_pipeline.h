#pragma once
// dist/exchange/group_pipeline.h for gradients in GPU memory: one group on its way through a step; what it sends, and what comes back.
// A compressed group has a compressor with kernels; a dense one is summed, as floats or (compress.values bf16) as
// bfloat16 numbers, and averaged as compress/dense.cpp does it.

#include <cstdint>
#include <memory>

#include "compress/cuda/device_compressor.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/cuda/device_step.h"
#include "dist/plan/merge_plan.h"
#include "nn/core/cuda/context.h"

namespace topknot {
class StateReader;
class StateWriter;
}  // namespace topknot

namespace topknot::cuda {

class DevicePipeline {
 public:
  // `compressor`: null for a dense group; `narrow`: its sums travel as bfloat16.
  DevicePipeline(const Group& group, std::unique_ptr<DeviceCompressor> compressor, bool narrow, int rank,
                 int ranks);

  void set_density(double density);
  void begin_step() { pending_ = group_->parameters.size(); }
  // One parameter is ready. True where it was the last.
  bool ready() { return --pending_ == 0; }
  void complete() { pending_ = 0; }
  bool is_complete() const { return pending_ == 0; }

  // On the compute stream.
  void encode(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step);
  // On the stream of the collectives. Nothing where there is one rank.
  void send(cudaStream_t stream, DeviceCommunicator& communicator, SumOrder order);
  // On the compute stream, once what send() does has been done.
  void decode(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step);
  void commit(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step);

  const Group& group() const { return *group_; }
  GradientForm form() const;
  // Whether the average lies in the slice's spare, so that the two swap roles; known once commit() has run.
  bool swaps() const { return swaps_; }
  std::uint64_t bytes_sent() const;  // as ExchangeStats
  std::uint64_t bytes_received() const;
  void save(StateWriter& writer) const;
  void load(StateReader& reader);

  Event encoded, arrived;  // on the compute stream, on the stream of the collectives

 private:
  const Group* group_;
  std::unique_ptr<DeviceCompressor> compressor_;
  bool narrow_;
  int rank_, ranks_;
  std::size_t pending_ = 0;
  bool swaps_ = false;
  float* gradient_ = nullptr;            // a dense group's, summed in place
  DeviceArray<std::byte> mine_, all_;    // a compressed group's blocks
  DeviceArray<std::uint16_t> narrowed_;  // what travels, where it is not the gradient itself
};

}  // namespace topknot::cuda
