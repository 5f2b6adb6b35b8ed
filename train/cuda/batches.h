#pragma once
// Batches in GPU memory, at the same addresses in every step, for graphs. Either the whole data set lies on
// the GPU and a kernel makes a batch of it (data.on_device), or the loader's batches are copied ahead.

#include <memory>

#include "train/batches.h"
#include "train/config/config.h"

namespace topknot::cuda {

// On the current context's GPU, which `neighbours` ranks share; for training with train.accumulate batches a step, or
// for evaluation. Data set, model and context must outlive them.
std::unique_ptr<Batches> make_device_batches(const Config& config, const Dataset& dataset,
                                             const Module& model, bool train, int rank, int ranks,
                                             int neighbours);

}  // namespace topknot::cuda
