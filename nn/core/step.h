#pragma once
// A step's input and its results in the memory of the device that computes it: on a GPU, kernels and captured graphs run
// without the host.

#include <cstdint>

namespace topknot {

// Values that change from step to step; written before the step, or the graph of a step, starts.
struct StepParameters {
  std::int64_t step = 0;        // 0-based; skipped steps count
  double lr = 1.0;              // learning rate
  double gradient_scale = 1.0;  // the optimizer's: a clip factor; 1 changes no bit
  double density = 1.0;         // of this step, in (0, 1]
  std::int32_t rank = 0;
};

// Results of a step; cleared before the step.
struct StepStatus {
  std::uint32_t bad = 0;       // 1: some rank's gradient, or a sum, was not finite; the same on all ranks
  std::int32_t bad_rank = -1;  // the first rank of which that is known; the same on all ranks
  std::uint64_t selected = 0;  // entries this rank sent, over all groups
  std::uint64_t over_capacity = 0;  // entries this rank selected and kept back
  double threshold = 0;             // of the last compressed group of this rank
};

// What of the optimizer's work a gradient already has in it.
enum class Applied {
  nothing,        // the averaged gradient
  momentum,       // before the average (DGC); the optimizer's own momentum is for weight decay
  learning_rate,  // before the average (LAGS-SGD)
};

struct StepState {
  StepParameters* parameters = nullptr;
  const StepStatus* status = nullptr;  // null: nothing is bad
};

}  // namespace topknot
