#pragma once
// Clipping by L2 norm: what is longer than `max_norm` is scaled to that length (Pascanu et al. 2013,
// section 3.2). Before compression over the whole model or tensor by tensor; after averaging over the model.
//
// Norms are summed in double in blocks of fixed size, so that they do not depend on the number of threads. A
// norm that is not finite clips nothing: the step's NaN or Inf must stay visible to the exchange, which skips
// the step. max_norm must be greater than 0; otherwise UserError.

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <span>

#include "nn/base/host_device.h"
#include "nn/core/step.h"
#include "nn/core/tensor.h"

namespace topknot {

double sum_of_squares(std::span<const float> values);
double l2_norm(std::span<const float> values);

void check_clip_norm(double max_norm);  // throws UserError unless it is greater than 0

// max_norm / norm if the norm is finite and greater than max_norm, else 1.
double clip_factor(double norm, double max_norm);
// The same of a max_norm that was checked, in kernels too.
TOPKNOT_HOST_DEVICE double clip_factor_of(double norm, double max_norm) {
  return norm <= DBL_MAX && norm > max_norm ? max_norm / norm : 1.0;
}

void scale(std::span<float> values, double factor);

// A sum of squares goes by blocks of so many values; in a block, lane l adds up the values l, l + kClipLanes,
// ... in order; the lanes of a block are added in order, and then the blocks.
inline constexpr std::size_t kClipBlock = 1 << 13;
inline constexpr std::size_t kClipLanes = 16;

// Vectors that one launch works on. They are an argument of the kernel, which CUDA before 12.1 limits to 4096 bytes.
struct ClipVectors {
  static constexpr std::size_t kMost = 192;
  ClipVectors(std::span<const std::span<float>> vectors);
  TOPKNOT_HOST_DEVICE std::uint32_t blocks() const { return first_block[count]; }

  std::uint32_t count;
  std::uint32_t first_block[kMost + 1];  // of each one, among the blocks of all; then how many there are
  float* data[kMost];
  std::size_t size[kMost];
};

// A device's kernels. `memory`: norm^2 of all vectors, to which `add` adds, of each one, and of their blocks.
struct ClipKernels {
  void (*sum_of_squares)(const ClipVectors& vectors, double* memory, bool add);
  // Multiplies by the clip factor of all, or of each.
  void (*scale)(const ClipVectors& vectors, const double* memory, bool each, double max_norm);
  void (*set_gradient_scale)(const double* memory, double max_norm, StepParameters* parameters);
};
constexpr std::size_t clip_doubles(std::size_t blocks) {
  return 1 + ClipVectors::kMost + blocks;
}

// The same on vectors in a device's memory, where the norm stays: on a GPU nothing waits for it, and there are three
// launches for kMost vectors. The sums have the same bits on every device.
class Clip {
 public:
  using Vectors = std::span<const std::span<float>>;
  Clip(Device device, std::size_t elements);  // of all vectors of a call, at most

  // norm^2 = the sum of squares of all vectors; the sums of the vectors are added in order.
  void sum_of_squares(Vectors vectors);
  void scale(Vectors vectors, double max_norm);  // by the clip factor of that norm
  // Each vector by itself. norm^2 is undefined afterwards.
  void clip_each(Vectors vectors, double max_norm);
  // After averaging: parameters->gradient_scale = the norm's clip factor, which saves the optimizer a pass.
  void set_gradient_scale(double max_norm, StepParameters* parameters);
  // norm^2, on the device
  const double* sum() const { return reinterpret_cast<const double*>(memory_.data()); }

 private:
  void in_batches(Vectors vectors, const auto& work);
  double* memory() { return reinterpret_cast<double*>(memory_.data()); }
  const std::size_t elements_;
  const ClipKernels& kernels_;
  Tensor memory_;  // of the kernels
};

}  // namespace topknot
