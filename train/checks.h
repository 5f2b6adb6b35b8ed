#pragma once
// Checks that all ranks have the same configuration, data and compute threads, before the first step, and
// parameters, between steps. Each is collective and throws the same error on every rank if the ranks differ.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/core/parameter.h"
#include "train/setup.h"

namespace topknot {

// The program's version and the keys of the configuration, but for those that say where a rank runs.
// UserError: what differs, every value, and the ranks that have it; check_same_data() too.
void check_same_configuration(Communicator& communicator, const Config& config);

// Identifies a run's data by entries such as "the number of training samples" with its value: for each split
// the numbers of samples, classes and targets, the shape and a checksum of the samples; a checksum of the
// vocabulary or the names of the classes. Paths are not included.
using DataFingerprint = std::map<std::string, std::string>;
DataFingerprint data_fingerprint(const RunData& data);
// The entry of the vocabulary, or of the classes' names.
inline constexpr const char* kVocabularyFingerprint = "the checksum of the vocabulary or the classes' names";
std::string vocabulary_fingerprint(const Dataset& data);

void check_same_data(Communicator& communicator, const DataFingerprint& mine);

// Gives the calling rank the threads of train.threads, or as many as OpenMP lets it have: rank 0 warns once,
// of the first rank that has fewer, and says what limits it. `before`: those of each rank of a checkpoint
// from which the run goes on, empty for none; train.threads 0 then is as before on CPUs, because sums over a
// batch depend on it. Returns those of all ranks. Collective.
std::vector<int> settle_threads(Communicator& communicator, const Config& config,
                                const std::vector<int>& before = {});

std::string checksum_hex(std::span<const float> weights);  // 16 hexadecimal digits

// Error: names the first rank and parameter that differ.
void check_same_parameters(ParameterArena& arena, CollectiveQueue& queue, const Communicator& communicator,
                           const std::string& when);

}  // namespace topknot
