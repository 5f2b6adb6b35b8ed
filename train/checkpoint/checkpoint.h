#pragma once
// Checkpoints on disk. RUN/checkpoints/step-000001200 holds, of the state after 1200 steps:
//
//   model.safetensors        weights and batch-norm statistics, by the names of parameters and buffers
//   optimizer.safetensors    the optimizer's buffers, "0.NAME", "1.NAME", ...
//   rank-0003.safetensors    what belongs to rank 3: "residual.NAME", "statistics.NAME" (recurrent states too), "exchange" (bytes);
//                            with local steps its weights "inner.0.NAME" and its optimizer's buffers "inner.1.NAME", ...
//   manifest.json            position, configuration, ranks, what the data are; size and checksum of every file, and its own
//
// A checkpoint is complete or absent: its files are written to step-000001200.partial and synced, the
// manifest last, and the directory is then renamed. What is interrupted leaves a .partial directory, which no
// reader looks at and the next start of the run removes. Where hosts share no file system, each has its own
// ranks' files under the same path.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/sampler.h"
#include "nn/core/parameter.h"
#include "optim/schedule.h"
#include "train/checkpoint/model_file.h"
#include "train/checkpoint/safetensors.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"

namespace topknot {

// Everything that makes a run go on with the same bits, as one rank has it between two steps. Sampler,
// augmentation and dropout draw from counters (nn/core/rng.h), so the step number stands for their state.
struct RunState {
  ModelCopy model;  // the statistics and recurrent states are the rank's own
  // Optimizer::state(): buffers of the arena's shape; the same on all ranks.
  std::vector<std::vector<float>> optimizer;
  // With local steps: this rank's weights, then its optimizer's buffers; `model` and `optimizer` are shared.
  std::vector<std::vector<float>> inner;
  std::vector<float> residual;      // in arena order; empty for a method that carries nothing
  std::vector<std::byte> exchange;  // Exchange::state()
};

// The state as tensors, which point into it, under the names given above. For the model: model_tensors().
std::vector<TensorView> optimizer_tensors(const ParameterStore& store, const RunState& state);
std::vector<TensorView> rank_tensors(const ParameterStore& store, const RunState& state);

// The reverse. Throw UserError, naming the tensor, where one is absent or has another type or shape.
void read_model(const ParameterStore& store, const SafetensorsFile& file, RunState& state);
void read_optimizer(const ParameterStore& store, const SafetensorsFile& file, RunState& state);
void read_rank(const ParameterStore& store, const SafetensorsFile& file, RunState& state);

// A run's position, the same on all ranks.
struct TrainingPosition {
  std::int64_t step = 0, skipped = 0;  // steps made, of which skipped
  std::int64_t skips_in_a_row = 0;
  // Sum over steps of this epoch, and how many: all so far, or those since the number of ranks changed.
  double epoch_loss = 0;
  std::int64_t epoch_loss_steps = 0;
  bool evaluated = false;   // the evaluation that was due after this step has been made
  Evaluation evaluation{};  // the last one
  PlateauState plateau{};   // schedule.name=plateau
  // Of a run whose starts had several numbers of ranks: Plan::shift, and what the earlier ones took of this epoch.
  std::int64_t shift = 0;
  std::vector<Dealt> dealt;
};

// Sums over a run up to its last record, over all ranks. Steps whose records are lost count too.
struct RunTotals {
  ByteCount bytes;
  double train_seconds = 0, eval_seconds = 0;
};

struct CheckpointFile {
  std::string name;  // inside the checkpoint's directory
  std::uint64_t bytes = 0, checksum = 0;
  bool operator==(const CheckpointFile&) const = default;
};

struct Manifest {
  TrainingPosition position;
  int ranks = 1;
  std::int64_t global_batch = 0;              // of setup.h
  std::string program;                        // its version
  std::map<std::string, std::string> config;  // every key with its value, as key_value() writes it
  std::map<std::string, std::string> data;    // its fingerprint (train/checks.h); empty: unknown
  std::vector<int> threads;                   // compute threads by rank; empty: unknown
  RunTotals totals;                           // of all steps up to here; zeros: unknown
  std::uint64_t metrics_bytes = 0;            // length of metrics.jsonl
  std::string parameter_checksum;             // 16 hexadecimal digits
  std::vector<CheckpointFile> files;
};

std::string manifest_text(const Manifest& manifest);
// Throws UserError, naming `where`, for anything that manifest_text() did not write.
Manifest parse_manifest(const std::string& text, const std::string& where);

// Throws UserError if the manifest lists no file of that name.
const CheckpointFile& file_of(const Manifest& manifest, const std::string& name);

std::string rank_file(int rank);  // "rank-0003.safetensors"
inline constexpr const char* kVocabulary =
    "vocabulary";  // language models: Dataset::vocabulary() in model.safetensors' metadata
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";

// The checkpoints of one run. Every function may throw UserError with path and reason.
class CheckpointStore {
 public:
  // The signature of write(2), the default; tests of interrupted writes give another function.
  using Write = std::function<ssize_t(int fd, const void* data, std::size_t size)>;
  explicit CheckpointStore(std::string directory, Write write = {});

  const std::string& directory() const { return directory_; }
  std::string path(std::int64_t step) const;   // DIRECTORY/step-000001200
  std::vector<std::int64_t> steps() const;     // of the checkpoints with a manifest, ascending
  Manifest manifest(std::int64_t step) const;  // read and checked against its own checksum
  // A file's bytes, checked against size and checksum of `expected`.
  std::vector<std::byte> read(std::int64_t step, const CheckpointFile& expected) const;

  // Writes and syncs a file of a checkpoint that is not published; removes that step's earlier one.
  CheckpointFile write(std::int64_t step, const std::string& name, std::span<const TensorView> tensors,
                       const Metadata& metadata = {}) const;
  // Writes the manifest and makes the checkpoint visible.
  void publish(std::int64_t step, const Manifest& manifest) const;
  // On hosts that do not see rank 0's files: the same without a manifest. Nothing if there is no .partial:
  // another rank of the host, or rank 0, has renamed it.
  void publish_rank_files(std::int64_t step) const;
  // Updates a published checkpoint after its evaluation: the position and the length of metrics.jsonl.
  void evaluated(std::int64_t step, const TrainingPosition& position, std::uint64_t metrics_bytes) const;
  void remove(std::int64_t step) const;  // nothing if there is none; several processes may do so at once
  // For a run that goes on from `step`: renames newer checkpoints, which it passed over, to
  // step-N.passed-over, so that none is taken for a later step. For several processes at once.
  void set_aside_after(std::int64_t step) const;
  void remove_partial() const;  // what interrupted writes have left

 private:
  std::string partial(std::int64_t step) const;
  void sync_directories() const;
  CheckpointFile write_file(const std::string& directory, const std::string& name,
                            const std::function<void(const ByteSink&)>& content) const;
  std::string directory_;
  Write write_;
};

// The checkpoint that a command means by RUN: a run directory, whose newest one is taken, or that of `step`, or
// one checkpoint's own directory. Throws UserError if there is none, or its manifest is damaged.
struct FoundCheckpoint {
  CheckpointStore store;
  std::int64_t step;
  Manifest manifest;
};
FoundCheckpoint find_checkpoint(const std::string& run, std::optional<std::int64_t> step = std::nullopt);
SafetensorsFile read_model_file(const FoundCheckpoint& checkpoint);

// Returns when what was written to a file, by whatever descriptor, is on the disk. Throws UserError.
void sync_file(const std::string& path);

}  // namespace topknot
