#pragma once
// Whether a machine can hold the ranks that a configuration puts on it.

#include "train/setup.h"

namespace topknot {

// Bytes of the training batches that a rank makes ahead.
double batches_bytes(const Config& config, const Dataset& data);

// Bytes of a rank's weights, gradients, residuals (or their room) and moments in host memory; 0 with a GPU.
double model_bytes(const Config& config, const Dataset& data);

// Throws UserError where `ranks` ranks in `processes` processes (1, or one per rank) need more memory or threads than
// this machine gives at all, or more address space than ulimit leaves a process, with the keys to lower. Counts only what
// is known before the first step: samples, batches, the model, and the stacks of threads.
void check_limits(const Config& config, const RunData& data, int ranks, int processes);

}  // namespace topknot
