#pragma once
// Evaluation over all ranks: every test sample once.

#include <array>
#include <cstdint>
#include <functional>

#include "data/loader.h"
#include "dist/comm/collective_queue.h"
#include "train/setup.h"

namespace topknot {

// Brings the ranks' batch-norm statistics together, in place; recurrent states stay. `mean` averages them, `rank0` takes rank 0's,
// `local` leaves them as they are (train.bn_stats).
void synchronize_statistics(const ParameterStore& store, const std::string& rule, CollectiveQueue& queue,
                            const Communicator& communicator);

// A model's statistics and states on the host, one buffer after the other: out of the store, and back.
void copy_statistics(const ParameterStore& store, std::vector<float>& to);
void restore_statistics(const std::vector<float>& from, ParameterStore& store);

struct Evaluation {
  double loss = 0;      // mean over the samples, or over a text's tokens
  double accuracy = 0;  // 0 to 1; of classification, else 0
};
// Called before each batch of an evaluation and after the last one, with the batches that are done and all of this rank's;
// false ends the evaluation there.
using EvaluationHook = std::function<bool(std::int64_t done, std::int64_t batches)>;
// Over the samples of this rank's loader: the sum of their losses, the number of correct answers, and that of samples
// (of a text: tokens).
std::array<double, 3> evaluation_sums(BuiltModel& model, Loader& loader, const EvaluationHook& hook);

// The loss of a batch: softmax cross-entropy with labels, mean squared error with targets.
Variable batch_loss(const Variable& output, const Batch& batch);

}  // namespace topknot
