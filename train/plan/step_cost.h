#pragma once
// What a step costs each rank in memory and computation, counted in a step of a few samples.

#include "train/setup.h"

namespace topknot {

struct StepCost {
  double forward_flops = 0, backward_flops = 0;  // of a step, PassCost::flops()
  double activations = 0;  // bytes of tensors at the peak of a pass over one batch, as on a CPU in fp32
  double optimizer = 0;    // bytes of the optimizer's buffers
  double method = 0;       // bytes that a method carries from step to step, beside the residual
};

// Makes a step of a few samples with `model`, whose weights stay as they are; activations and operations are
// extrapolated to data.batch_size. `options`: as stand_in_options().
StepCost count_step_cost(const Config& config, const Dataset& data, BuiltModel& model,
                         const ExchangeOptions& options);

}  // namespace topknot
