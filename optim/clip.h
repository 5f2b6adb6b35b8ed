#pragma once
// Clipping by L2 norm: what is longer than `max_norm` is scaled to that length (Pascanu et al. 2013,
// section 3.2). Before compression over the whole model or tensor by tensor; after averaging over the model.
//
// Norms are summed in double in blocks of fixed size, so that they do not depend on the number of threads. A
// norm that is not finite clips nothing: the step's NaN or Inf must stay visible to the exchange, which skips
// the step. max_norm must be greater than 0; otherwise UserError.

#include <cfloat>
#include <cstddef>
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

// By device, as the members of Clip of these names. `blocks`: a double for each kClipBlock values begun.
struct ClipKernels {
  void (*sum_of_squares)(const float* values, std::size_t n, double* blocks, double* sum, bool add);
  void (*scale)(float* values, std::size_t n, const double* sum, double max_norm);
  void (*set_gradient_scale)(const double* sum, double max_norm, StepParameters* parameters);
};

// The same on vectors in a device's memory, where the norm stays: on a GPU nothing waits for it. The sums
// have the same bits on every device.
class Clip {
 public:
  Clip(Device device, std::size_t longest);  // `longest`: elements of the longest vector

  // norm^2 = the sum of squares of the values, or, with `add`, the old one and that.
  void sum_of_squares(std::span<const float> values, bool add);
  void scale(std::span<float> values, double max_norm);  // by the clip factor of the norm
  // After averaging: parameters->gradient_scale = the clip factor of the norm, which saves the optimizer a
  // pass.
  void set_gradient_scale(double max_norm, StepParameters* parameters);
  // norm^2, on the device
  const double* sum() const { return reinterpret_cast<const double*>(memory_.data()); }

 private:
  double* memory() { return reinterpret_cast<double*>(memory_.data()); }
  const std::size_t longest_;
  const ClipKernels& kernels_;
  Tensor memory_;  // norm^2, then the sums of blocks
};

}  // namespace topknot
