#pragma once
// A compressor whose data stay on the GPU: the CUDA counterpart of compress/compressor.h, step by step, on a
// stream. Nothing here waits for the GPU: counts, thresholds, and whether the step was finite, live in the
// GPU's memory, so that a whole step can be captured in a graph. One instance per group and rank. A step:
//
//   encode(slice, step, block)      u = gradient + residual over the gradient's memory; this rank's block
//   decode(blocks, step, status)   all ranks' blocks, one after the other; a rank's NaN or Inf clears the status
//   commit(step, status)           where the status of all groups is good: residual, state and average are the
//                                   step's; else all is as before encode
//
// The host always lets the two memories of a slice swap roles after commit() (where it returns the residual): a
// step that is refused has copied the old residual over by then.
//
// The block is the wire format of compress/codec/codec.h, byte for byte what the CPU writes, followed by zeros up
// to the equal length that ncclAllGather wants; the last kTrailerBytes of that are the exchange's.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "nn/core/step.h"

namespace topknot::cuda {

struct DeviceSlice {
  std::span<float> gradient, residual;  // GPU memory
};

class DeviceCompressor {
 public:
  virtual ~DeviceCompressor() = default;

  // Bytes of every rank's block, a multiple of 16, for steps of this density or less.
  virtual std::size_t block_bytes() const = 0;
  // All on `stream`. `block`: block_bytes() of GPU memory, aligned to 16.
  virtual void encode(cudaStream_t stream, DeviceSlice slice, const StepParameters* step, StepStatus* status,
                      std::byte* block) = 0;
  // `blocks`: one of block_bytes() a rank, in rank order. `weights`: a float per rank, GPU memory, mean 1.
  virtual void decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
                      StepStatus* status) = 0;
  // The memory that holds the average, once this has run: the slice's gradient or residual.
  virtual std::span<float> commit(cudaStream_t stream, const StepStatus* status) = 0;

  virtual GradientForm form() const { return GradientForm::plain; }
  // Capacities and grids follow the greatest density of the steps to come; changes what a graph has captured.
  virtual void set_density(double density) = 0;
  // As Compressor's; waits for the GPU, but for long lists that `writer` leaves out.
  virtual void save(StateWriter& writer) const = 0;
  std::vector<std::byte> state() const;
  virtual void load_state(std::span<const std::byte> bytes) = 0;
};

// Methods with kernels that are no selection: `make` for options that the CPU has checked.
struct DeviceMethod {
  std::unique_ptr<DeviceCompressor> (*make)(const CompressOptions& options, const GroupSpec& group);
};
Registry<DeviceMethod>& device_methods();

// The compressor of these options on the current context's GPU; null where the method, or one of its pieces, has
// no kernels (it then runs on the CPU, over a copy of the gradient). Throws UserError as make_compressor().
std::unique_ptr<DeviceCompressor> make_device_compressor(const CompressOptions& options,
                                                         const GroupSpec& group);

}  // namespace topknot::cuda
