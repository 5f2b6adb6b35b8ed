#pragma once
// What a resumed run starts from.

#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "train/checkpoint/checkpointer.h"
#include "train/checks.h"
#include "train/config/config.h"

namespace topknot {

struct ResumedRun {
  Manifest manifest;
  std::vector<SavedCheckpoint> saved;  // with a readable manifest, this one the last
  std::vector<SafetensorsFile> model;  // the model, the optimizer
  // This rank's file; with resume.residuals=sum those of all ranks that there were; with reset none.
  std::vector<SafetensorsFile> ranks;
  bool summed = false;

  // For a model of this layout. From the files of N ranks, sum gives every rank 1/N of the sum of their residuals, so
  // that the average over the ranks still owes the same; thresholds, momenta and masks begin anew.
  RunState state(const ParameterStore& store) const;
};

// The newest checkpoint that every rank can read whole; a newer one is passed over with a warning. Files of the model
// come from rank 0, a rank's own from its file system. Collective. Throws UserError, the same on all ranks,
// where there is none, where the number of ranks differs and resume.residuals is keep, where keys differ that decide
// what the run computes (all are named), and where `data` differ and resume.data is check. Throws UserError too where a
// tensor has a NaN or an infinity, on the ranks that read it.
ResumedRun read_checkpoint(const CheckpointStore& store, Communicator& communicator, const Config& config,
                           const DataFingerprint& data);

// The same refusals before a rank is started, from the manifests alone.
void check_resumable(const CheckpointStore& store, const Config& config, const DataFingerprint& data);

// Every key and its value, as a manifest has it.
std::map<std::string, std::string> config_values(const Config& config);

}  // namespace topknot
