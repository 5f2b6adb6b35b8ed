// The library times nothing: its compressors take the first candidate.
#include "nn/core/cuda/trial.h"

namespace topknot::cuda {

TrialSubject::TrialSubject(const char* subject) : name(subject) {}

std::size_t Trial::pick(const std::string&, std::span<const TrialCandidate>) {
  return 0;
}

}  // namespace topknot::cuda
