#pragma once
// A run's checkpoints: saved while it goes on, and read by a run that is resumed. Checkpointer::save() copies
// the rank's state and returns; a thread of its own writes the files. The ranks agree on each phase through
// the step, so that all of them know of the same checkpoints:
//
//   writing     each rank writes its file, rank 0 also the model and the optimizer
//   publishing  rank 0 has everybody's checksums, writes the manifest and renames the directory; then ranks of other hosts
//               rename theirs
//   published   all have it: old checkpoints are removed
//
// A checkpoint that some rank could not write is dropped with a warning, and the run goes on.

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"
#include "train/config/config.h"
#include "train/step.h"

namespace topknot {

// A published checkpoint, as the rule for keeping them sees it.
struct SavedCheckpoint {
  std::int64_t step = 0;
  bool evaluated = false;
  Evaluation evaluation{};
  bool operator==(const SavedCheckpoint&) const = default;
};
// Those to remove, where `saved` ascends by step: all but the last `keep` and the best. The best has the
// greatest test accuracy, among equals the least test loss, and among these is the latest.
std::vector<std::int64_t> superseded(const std::vector<SavedCheckpoint>& saved, int keep);

class Checkpointer {
 public:
  // `metrics`: the run's metrics.jsonl, whose records so far are on the disk before a manifest that counts
  // them. `keep`: 1 or more. `saved`: what the run's directory has already, the same on all ranks. `check`
  // throws if the directory is no longer this run's, in which case nothing more becomes visible there. The
  // step must outlive it.
  Checkpointer(CheckpointStore store, std::string metrics, Step& step, int rank, int ranks, int keep,
               std::vector<SavedCheckpoint> saved, std::function<void()> check = {});
  ~Checkpointer() {
    if (work_.valid()) work_.wait();
  }

  // Collective, as advance() and finish(): waits for the checkpoint under way, then copies the state.
  // `manifest` without files and parameter_checksum; there is no step whose statistics were not asked for.
  void save(Manifest manifest);
  // 1 if this rank has done its part of the phase, else 0. If all ranks have 1, all call advance().
  double ready() const;
  void advance();
  // The evaluation of the checkpoint that the run was resumed from, which the stop had left out.
  void evaluated(const TrainingPosition& position, std::uint64_t metrics_bytes);
  // Ends the checkpoint under way. False if it could not be written. Error if a disk takes half an hour.
  bool finish();

 private:
  enum class Phase { idle, writing, publishing, published };
  void write_files();
  void start(void (Checkpointer::*work)());
  bool end_work();
  void begin_publishing();
  void end_publishing();
  void publish();
  void delete_superseded() {
    for (const std::int64_t step : superseded_) store_.remove(step);
  }

  const CheckpointStore store_;
  const std::string metrics_;
  const std::function<void()> check_;
  Step& step_;
  const int rank_, ranks_, keep_;
  std::vector<SavedCheckpoint> saved_;
  Phase phase_ = Phase::idle;
  bool written_ = true;  // the last one
  Manifest manifest_;
  RunState state_;                        // reused, so that a copy touches no new memory
  std::function<void()> complete_state_;  // as Step::state() returned it
  std::vector<CheckpointFile> files_;
  std::vector<std::int64_t> superseded_;
  std::future<void> work_;
};

struct ResumedRun {
  Manifest manifest;
  std::vector<SavedCheckpoint> saved;  // with a readable manifest, this one the last
  std::vector<SafetensorsFile> model;  // the model, the optimizer
  // This rank's file; with resume.residuals=sum those of all ranks that there were; with reset none.
  std::vector<SafetensorsFile> ranks;
  bool summed = false;

  // For a model of this layout. From the files of N ranks, sum gives every rank 1/N of the sum of their
  // residuals, so that their average is unchanged; thresholds, momenta and masks begin anew.
  RunState state(const ParameterStore& store) const;
  // Compute threads by rank; empty: unknown. Earlier versions do not say, and gave each of several ranks one.
  std::vector<int> threads() const {
    if (!manifest.threads.empty() || manifest.ranks == 1) return manifest.threads;
    return std::vector<int>(static_cast<std::size_t>(manifest.ranks), 1);
  }
};

// The newest checkpoint that every rank can read whole; a newer one is passed over with a warning. Files of
// the model come from rank 0, a rank's own from its file system. Collective. Throws UserError, the same on
// all ranks, where there is none, where the number of ranks differs and resume.residuals is keep, where keys
// differ that decide what the run computes (all are named), and where `data` differ and resume.data is check.
// Throws UserError too where a tensor has a NaN or an infinity, on the ranks that read it.
ResumedRun read_checkpoint(const CheckpointStore& store, Communicator& communicator, const Config& config,
                           const DataFingerprint& data);

// The checkpoints up to this step, as rank 0 finds them. Collective.
std::vector<SavedCheckpoint> shared_checkpoints(const CheckpointStore& store, Communicator& communicator,
                                                std::int64_t last);

// The same refusals before a rank is started, from the manifests alone.
void check_resumable(const CheckpointStore& store, const Config& config, const DataFingerprint& data);

// The plan of a start that goes on from `manifest`, and its position. With another number of ranks the run is where it
// was in its epoch: the samples that are left of it are dealt anew. Before the first start_epoch().
Plan resume_plan(const Manifest& manifest, const Config& config, const Dataset& data, int ranks, Step& step,
                 TrainingPosition& position);
// Warns if a resumed run's next learning rate is not its checkpoint's, by another length or number of ranks.
void warn_of_other_rate(const Manifest& manifest, const Config& config, const Dataset& data, const Plan& now);

// Every key and its value, as a manifest has it.
std::map<std::string, std::string> config_values(const Config& config);

}  // namespace topknot
