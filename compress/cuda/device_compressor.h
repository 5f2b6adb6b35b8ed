#pragma once
// Compressors of gradients in GPU memory: compress/compressor.h, step by step, on the current context's
// compute stream. Nothing here waits for the GPU: counts, thresholds, and whether the step was finite, live
// in the GPU's memory, so that a whole step can be captured in a graph. A step:
//
//   encode(slice, context)  u = gradient + residual over the gradient's memory; this rank's message
//   decode(round)           all ranks' messages; a rank's NaN or Inf makes the status bad
//   commit()                if the status of all groups is good: residual, state and average are the
//                           step's; else all is as before encode
//
// The host always commits, and lets the two memories of a slice swap roles if commit() returns the
// residual's: a step that is refused has copied the old residual over by then.
//
// A block is the wire format of compress/codec/codec.h, byte for byte what the CPU writes, followed by zeros
// up to the equal length that ncclAllGather wants (Message::gpu_block).

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "compress/compressor.h"

namespace topknot::cuda {

// Methods with kernels that are no selection: `make` for options that the CPU has checked.
struct DeviceMethod {
  std::unique_ptr<Compressor> (*make)(const CompressOptions& options, const GroupSpec& group);
};
Registry<DeviceMethod>& device_methods();

// The compressor of these options on the current context's GPU; null if the method, or one of its pieces, has
// no kernels (it then runs on the CPU, over a copy of the gradient). Throws UserError as make_compressor().
std::unique_ptr<Compressor> make_device_compressor(const CompressOptions& options, const GroupSpec& group);

// A gradient and a weight in GPU memory: x *= *weight. Nothing is read if the weight is 1.
void multiply_by_weight(cudaStream_t stream, float* x, std::size_t n, const float* weight);
// x /= *total. Nothing is read where the total is 0 or 1.
void divide_by_total(cudaStream_t stream, float* x, std::size_t n, const float* total);

}  // namespace topknot::cuda
