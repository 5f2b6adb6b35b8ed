#pragma once
// Selection + memory + code on a GPU, the CUDA counterpart of compress/sparse.h, with the same bits in blocks,
// averages, residuals and states.
//
// A block that the CPU throws Error for is a bad step here: the status names its rank. So is a sum that
// could overflow (SparseCompressor::summable), which names none.

#include <memory>
#include <vector>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "compress/cuda/device_step_kernels.h"
#include "compress/memory/cuda/device_memory.h"
#include "compress/select/cuda/device_selector.h"

namespace topknot::cuda {

class DeviceSparseCompressor final : public DeviceCompressor {
 public:
  // `selector`: of the group's segments. The density is 1 until set_density().
  DeviceSparseCompressor(std::unique_ptr<DeviceSelector> selector, std::unique_ptr<DeviceMemory> memory,
                         std::unique_ptr<DeviceCodec> code, bool lr_inside, const GroupSpec& group);

  std::size_t block_bytes() const override;
  void encode(cudaStream_t stream, DeviceSlice slice, const StepParameters* step, StepStatus* status,
              std::byte* block) override;
  void decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
              StepStatus* status) override;
  std::span<float> commit(cudaStream_t stream, const StepStatus* status) override;
  GradientForm form() const override;
  void set_density(double density) override;
  void save(StateWriter& writer) const override;
  void load_state(std::span<const std::byte> bytes) override;

 private:
  std::vector<double> densities() const;  // by segment
  void prepare();                         // memory for this density
  DeviceSent list() const;                // what this rank selected

  GroupSpec group_;
  std::unique_ptr<DeviceSelector> selector_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceCodec> code_;
  bool lr_inside_ = false;

  double density_ = 1;
  bool prepared_ = false;
  std::vector<DeviceRange> ranges_;
  SelectMemory selected_;
  DeviceArray<std::uint32_t> starts_;  // then count and finite
  JoinedList joined_;
  DeviceArray<std::uint32_t> indices_;  // the list, of several ranges
  DeviceArray<float> values_;
  DeviceArray<float> sent_by_slot_, sent_;       // as decoded, where the code is not exact
  DeviceArray<std::uint32_t> received_indices_;  // of all ranks
  DeviceArray<float> received_values_;
  DeviceArray<DecodedStats> received_;
  DeviceArray<float> weights_;  // by rank, then this rank's

  // Of the step under way.
  DeviceSlice slice_;
  const StepParameters* step_ = nullptr;
};

}  // namespace topknot::cuda
