#pragma once
// The compute threads of all ranks, and what must be the same on all ranks, compared before the first step. Each call is collective and throws the same
// UserError on every rank where the ranks differ: what differs, every value, and the ranks that have it.

#include <map>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "train/setup.h"

namespace topknot {

// The program's version and the keys of the configuration, but for those that say where a rank runs.
void check_same_configuration(Communicator& communicator, const Config& config);

// What tells a run's data from other data, as "the number of training samples" and its value: of each split the numbers of
// samples, classes and targets, the shape and a checksum of the samples; a checksum of the vocabulary or the names of the
// classes. Where the files lie is no part of it.
using DataFingerprint = std::map<std::string, std::string>;
DataFingerprint data_fingerprint(const RunData& data);

void check_same_data(Communicator& communicator, const DataFingerprint& mine);

// Gives the calling rank the threads of train.threads, or as many as OpenMP lets it have: rank 0 warns once, of the first rank
// that has fewer, and says what limits it. `before`: those of each rank of a checkpoint from which the run goes on, empty for
// none; train.threads 0 then is as before on CPUs, because sums over a batch depend on it. Returns those of all ranks.
// Collective.
std::vector<int> settle_threads(Communicator& communicator, const Config& config,
                                const std::vector<int>& before = {});

}  // namespace topknot
