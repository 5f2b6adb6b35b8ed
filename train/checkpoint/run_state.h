#pragma once
// Everything that makes a run go on with the same bits, as one rank has it between two steps. Sampler, augmentation and
// dropout draw from counters (nn/core/rng.h), so the step number stands for their state.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nn/core/parameter.h"
#include "optim/schedule.h"
#include "train/checkpoint/model_file.h"
#include "train/evaluate.h"
#include "train/metrics/byte_count.h"

namespace topknot {

struct RunState {
  ModelCopy model;  // the statistics and recurrent states are the rank's own
  std::vector<std::vector<float>>
      optimizer;                    // Optimizer::state(): buffers of the arena's shape; the same on all ranks
  std::vector<float> residual;      // in arena order; empty for a method that carries nothing
  std::vector<std::byte> exchange;  // Exchange::state()
};

// The state as tensors, which point into it, under the names that train/checkpoint/checkpoint.h gives. For the model:
// model_tensors().
std::vector<TensorView> optimizer_tensors(const ParameterStore& store, const RunState& state);
std::vector<TensorView> rank_tensors(const ParameterStore& store, const RunState& state);

// The reverse. Throw UserError, naming the tensor, where one is absent or has another type or shape.
void read_model(const ParameterStore& store, const SafetensorsFile& file, RunState& state);
void read_optimizer(const ParameterStore& store, const SafetensorsFile& file, RunState& state);
void read_rank(const ParameterStore& store, const SafetensorsFile& file, RunState& state);

// Where a run stands, the same on all ranks.
struct TrainingPosition {
  std::int64_t step = 0, skipped = 0;  // steps made, of which skipped
  std::int64_t skips_in_a_row = 0;
  // Sum over steps of this epoch, and how many: all so far, or those since the number of ranks changed.
  double epoch_loss = 0;
  std::int64_t epoch_loss_steps = 0;
  bool evaluated = false;   // the evaluation that was due after this step has been made
  Evaluation evaluation{};  // the last one
  PlateauState plateau{};   // schedule.name=plateau
};

// What a run's last record sums up, over all ranks. Steps whose records are lost count too.
struct RunTotals {
  ByteCount bytes;
  double train_seconds = 0, eval_seconds = 0;
};

}  // namespace topknot
