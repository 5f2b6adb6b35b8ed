#pragma once
// Evaluation over all ranks: every test sample once.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "train/batches.h"
#include "train/setup.h"

namespace topknot {

// Brings the ranks' batch-norm statistics together, in place; recurrent states stay. `mean` averages them,
// `rank0` takes rank 0's, `local` leaves them as they are (train.bn_stats).
void synchronize_statistics(const ParameterStore& store, const std::string& rule, CollectiveQueue& queue,
                            const Communicator& communicator);

// A model's statistics and states on the host, one buffer after the other: out of the store, and back.
void copy_statistics(const ParameterStore& store, std::vector<float>& to);
void restore_statistics(const std::vector<float>& from, ParameterStore& store);

struct Evaluation {
  double loss = 0;  // mean over the samples, or over a text's tokens
  // 0 to 1; of transcription 1 - word error rate, which may be below 0; of other tasks 0
  double accuracy = 0;
  double second = 0;  // what Metric::second() names: top-5 accuracy, character error rate, else 0
};
// Sums that the ranks add up for an Evaluation; errors of words and characters are those of the best path.
struct EvaluationSums {
  double loss = 0, samples = 0, correct = 0, top5 = 0, word_errors = 0, words = 0, character_errors = 0,
         characters = 0;
  std::span<double> values() { return {&loss, 8}; }
  Evaluation mean() const;
};
static_assert(sizeof(EvaluationSums) == 8 * sizeof(double));
// Top-5 accuracy says something if there are more than ten classes.
bool counts_top5(const Dataset& data);
// Called around each batch of an evaluation, with this rank's batches done and in all; false ends it.
using EvaluationHook = std::function<bool(std::int64_t done, std::int64_t batches)>;
// Over all of this rank's batches, on the model's device to the end: the host may be ahead of a GPU.
EvaluationSums evaluation_sums(BuiltModel& model, Batches& batches, const EvaluationHook& hook);
// Adds the errors of a batch's transcripts, by labels and lengths on the host. Waits for the logits' device.
void add_transcript_errors(const Module& module, const Tensor& logits, const Batch& batch,
                           EvaluationSums& sums);

}  // namespace topknot
