#pragma once
// CUDA counterpart of compress/memory/memory.h: works on a stream; the host does not know the outcome of a
// step. The arithmetic is the CPU's, bit for bit. One per group and rank. A step:
//
//   accumulate(slice, step)                what the selection's own pass makes u with
//   commit(stream, status, slice, sent, round)   Good: what was sent leaves u, and the average is made. Bad: the
//                                          memory of u gets the old residual, and a velocity its old values
//
// After commit(), which returns the one with the average, the slice's two memories swap if has_residual().
//
// DGC with momentum has two velocities, of which one is read and the other written. Which one follows from
// the slice: the steps that find the gradient in one memory read the first, the others the second. So a graph
// captured for one of the orders stays right, and a bad step, which copies, swaps too.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "compress/codec/cuda/device_codec.h"
#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "compress/state.h"
#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// This rank's sent entries, in GPU memory.
struct DeviceSent {
  const std::uint32_t* positions = nullptr;  // in the group, strictly ascending
  const float* values = nullptr;             // as the other ranks decoded them
  const std::uint32_t* count = nullptr;      // how many
};

// The entries that all ranks sent, in GPU memory.
struct DeviceRound {
  DecodedEntries lists;
  std::size_t capacity = 0;  // of each rank's list
  int ranks = 1;
  const float* weights = nullptr;  // by rank
};

class DeviceMemory {
 public:
  // dgc: a residual memory with a velocity if there is momentum.
  enum class Kind { none, residual, dgc };

  // For a group of n elements, in the current context, with momentum, nesterov, momentum_masking, lr_inside.
  DeviceMemory(Kind kind, const CompressOptions& options, std::size_t n);

  // Returns the whole group's; Accumulate::from() makes a segment's. slice.residual is not used by memory
  // none. The slice's two memories must be the same as in all steps before, in either order.
  Accumulate accumulate(const Slice& slice, const StepParameters* step);
  // The same slice. Returns the memory that has the average, bit for bit average_sparse() of compress/sparse.h, or
  // is left as it is where the status is bad: residual, or (memory none) the gradient's own.
  std::span<float> commit(cudaStream_t stream, const StepStatus* status, const Slice& slice,
                          const DeviceSent& sent, const DeviceRound& round);

  bool has_residual() const { return kind_ != Kind::none; }  // as Memory's
  bool owns_momentum() const { return kind_ == Kind::dgc; }  // as Memory's
  // The same bytes as the CPU's memory saves; wait for the GPU.
  void save(StateWriter& writer) const;
  void load(StateReader& reader);

 private:
  std::size_t read_by(const Slice& slice) const;
  void clear();

  Kind kind_;
  std::size_t n_;
  bool lr_inside_;
  float momentum_ = 0;
  bool nesterov_ = false, masking_ = false;
  // With momentum alone. current_, for graphs: the last step's velocity, and whether one was committed.
  DeviceArray<float> velocity_[2];
  DeviceArray<std::uint32_t> current_;
  const float *first_ = nullptr, *second_ = nullptr;  // the slice's memories, as the first step found them
};

// Makes compress.memory `memory`: residual, none or dgc; null for the others, which have no kernels.
std::unique_ptr<DeviceMemory> make_device_memory(const std::string& memory, const CompressOptions& options,
                                                 std::size_t n);

}  // namespace topknot::cuda
