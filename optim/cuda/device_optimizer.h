#pragma once
// Update rules and clipping on a GPU: optim/optimizer.h and optim/clip.h on a stream, with the numbers of the step
// in GPU memory. A step whose status is bad changes nothing.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "nn/core/cuda/context.h"
#include "nn/core/cuda/step_parameters.h"
#include "optim/cuda/arena_slice.h"
#include "optim/optimizer.h"

namespace topknot::cuda {

class DeviceOptimizer {
 public:
  virtual ~DeviceOptimizer() = default;
  // As Optimizer::update(), with the step, lr and gradient_scale of `parameters`, on `stream`. The gradient is in GPU
  // memory.
  virtual void update(cudaStream_t stream, std::size_t offset, std::span<const float> gradient,
                      const StepParameters* parameters, const StepStatus* status,
                      GradientForm form = GradientForm::plain) = 0;
  // As Optimizer::state(), in GPU memory.
  virtual std::vector<std::span<float>> state() { return {}; }
};

// What the kernels of update rules know of the arena, which is on the current context's GPU.
class ArenaSlices {
 public:
  ArenaSlices(const OptimizerOptions& options, ParameterArena& arena);
  // Throws Error where the slice lies outside the arena.
  ArenaSlice slice(std::size_t offset, std::span<const float> gradient) const;

 private:
  ParameterArena& arena_;
  DeviceArray<std::uint64_t> boundaries_;  // between ranges that decay and ranges that do not
  bool first_decays_ = false;
};
// Fills a buffer of state with zeros; waits for that.
void zero(const DeviceArray<float>& buffer);

using DeviceOptimizerFactory = std::unique_ptr<DeviceOptimizer> (*)(const OptimizerOptions& options,
                                                                    ParameterArena& arena);
// The optimizers that have kernels, under their names in optimizers().
Registry<DeviceOptimizerFactory>& device_optimizers();

// Throws UserError as make_optimizer(), and for an optimizer without kernels. The arena is on the current context's GPU and must outlive the result.
std::unique_ptr<DeviceOptimizer> make_device_optimizer(const OptimizerOptions& options,
                                                       ParameterArena& arena);

// Sums of squares in double, in the blocks and the order of optim/clip.h: the CPU's bits.
class DeviceClip {
 public:
  explicit DeviceClip(std::size_t elements);  // of the longest vector
  ~DeviceClip();

  // sum (a double in GPU memory) = the sum of squares of the values; with add, it is added to.
  void sum_of_squares(cudaStream_t stream, std::span<const float> values, double* sum, bool add);
  // values *= clip_factor(sqrt(*sum), max_norm)
  void scale(cudaStream_t stream, std::span<float> values, const double* sum, double max_norm);
  // parameters->gradient_scale = clip_factor(sqrt(*sum), max_norm)
  void set_gradient_scale(cudaStream_t stream, const double* sum, double max_norm,
                          StepParameters* parameters);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace topknot::cuda
