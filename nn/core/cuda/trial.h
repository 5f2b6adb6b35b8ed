#pragma once
// A trial chooses among ways to compute the same thing, its candidates, by their times on this GPU. It runs at
// the first use of a shape, and the caller keeps its answer. Candidate 0 is the way that always works; it wins
// against a candidate that is less than 2 % faster.
//
// The choice of an earlier process is taken from Context::algorithm_cache(), by the candidate's name, if the
// candidate still runs. Deterministic runs time nothing and take the first candidate that repeats its bits: a
// choice by time could differ between two runs. A stream in a capture times nothing either.

#include <functional>
#include <span>
#include <string>

#include "nn/core/cuda/context.h"

namespace topknot::cuda {

struct TrialCandidate {
  std::string name;  // in messages and files: one line without ';' and " = "
  // Puts one run on the stream, over memory that is the trial's alone. False: it does not do this shape.
  std::function<bool(cudaStream_t)> run;
  bool repeats = true;  // computes the same bits in every run
};

class Trial {
 public:
  // The number of the candidate to use. A candidate that returns false, throws CudaError or lacks memory is not
  // chosen; after an error, which may be of this run alone, nothing is kept for later processes. Candidate 0 if
  // all fail. Throws UserError for a forced name that no candidate has or that may not run, CudaError if the
  // GPU is lost.
  static int pick(Context& context, const std::string& key, std::span<const TrialCandidate> candidates);

  // "KEY=NAME;KEY=NAME...", for tests and measurements: the context's trials whose key begins with KEY pick
  // NAME, untimed. Throws UserError for other text; a KEY that no trial has is not noticed.
  static void force(Context& context, const std::string& choices);
};

// The shortest of four times of what `run` puts on the stream, in milliseconds; infinity if it returns false.
// The stream is held while the host works. The first run also loads the kernels' code.
inline constexpr int kTrialTimings = 4;
float shortest_ms(cudaStream_t stream, const std::function<bool(cudaStream_t)>& run);

}  // namespace topknot::cuda
