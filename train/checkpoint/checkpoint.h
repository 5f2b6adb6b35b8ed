#pragma once
// Checkpoints on disk. RUN/checkpoints/step-000001200 holds, of the state after 1200 steps:
//
//   model.safetensors        weights and batch-norm statistics, by the names of parameters and buffers
//   optimizer.safetensors    the optimizer's buffers, "0.NAME", "1.NAME", ...
//   rank-0003.safetensors    what belongs to rank 3: "residual.NAME", "statistics.NAME" (recurrent states too), "exchange" (bytes)
//   manifest.json            position, configuration, ranks, what the data are; size and checksum of every file, and its own
//
// A checkpoint is complete or absent: its files are written to step-000001200.partial and synced, the manifest last, and
// the directory is then renamed. What is interrupted leaves a .partial directory, which no reader looks at and the next
// start of the run removes. Where hosts share no file system, each has its own ranks' files under the same path.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "train/checkpoint/run_state.h"
#include "train/checkpoint/safetensors.h"

namespace topknot {

struct CheckpointFile {
  std::string name;  // inside the checkpoint's directory
  std::uint64_t bytes = 0, checksum = 0;
  bool operator==(const CheckpointFile&) const = default;
};

struct Manifest {
  TrainingPosition position;
  int ranks = 1;
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

// Throws UserError where the manifest lists no file of that name.
const CheckpointFile& file_of(const Manifest& manifest, const std::string& name);

std::string rank_file(int rank);  // "rank-0003.safetensors"
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";

// The checkpoints of one run. Every function may throw UserError with path and reason.
class CheckpointStore {
 public:
  // As write(2), which it is but in tests of interrupted writes.
  using Write = std::function<ssize_t(int fd, const void* data, std::size_t size)>;
  explicit CheckpointStore(std::string directory, Write write = {});

  const std::string& directory() const { return directory_; }
  std::string path(std::int64_t step) const;   // DIRECTORY/step-000001200
  std::vector<std::int64_t> steps() const;     // of the checkpoints with a manifest, ascending
  Manifest manifest(std::int64_t step) const;  // read and checked against its own checksum
  // A file's bytes, checked against size and checksum of `expected`.
  std::vector<std::byte> read(std::int64_t step, const CheckpointFile& expected) const;

  // Writes and syncs one file of a checkpoint that is not published yet. An earlier one of that step is removed.
  CheckpointFile write(std::int64_t step, const std::string& name, std::span<const TensorView> tensors,
                       const Metadata& metadata = {}) const;
  // Writes the manifest and makes the checkpoint visible.
  void publish(std::int64_t step, const Manifest& manifest) const;
  // On hosts that do not see rank 0's files: the same without a manifest. Nothing where there is no .partial: another
  // rank of the host, or rank 0, has renamed it.
  void publish_rank_files(std::int64_t step) const;
  // Of a published checkpoint whose evaluation came later: what it says of its position and of metrics.jsonl.
  void evaluated(std::int64_t step, const TrainingPosition& position, std::uint64_t metrics_bytes) const;
  void remove(std::int64_t step) const;  // nothing where there is none; several processes may do so at once
  // Of a run that goes on from `step`: newer checkpoints, which it passed over, become step-N.passed-over, so that none is
  // taken for one of the steps that follow. Several processes may do so at once.
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

// Returns when what was written to a file, by whatever descriptor, is on the disk. Throws UserError.
void sync_file(const std::string& path);

}  // namespace topknot
