#pragma once
// A trial chooses among ways to compute the same thing, its candidates, by their times on the current context's
// stream. It runs at the first use of a shape, and the caller keeps its answer. Candidate 0 is the way that always works; it wins
// against a candidate that is less than 2 % faster.
//
// The choice of an earlier process is taken from Context::algorithm_cache(), by the candidate's name, if the
// candidate still runs. Deterministic runs time nothing and take the first candidate that repeats its bits: a
// choice by time could differ between two runs. Nothing is timed in a capture either.

#include <cstddef>
#include <functional>
#include <span>
#include <string>

namespace topknot::cuda {

inline constexpr int kTrialTimings = 4;  // of each candidate: the first run also loads the kernels' code

struct TrialCandidate {
  std::string name;  // in messages and files: one line without ';' and " = "
  // Puts one run on the stream; what it writes is the trial's alone. False: it does not do this shape.
  std::function<bool()> run;
  bool repeats = true;  // computes the same bits in every run
};

// What trials choose for, "batch norm": their keys are this and " of ...". Global, for Trial::force().
struct TrialSubject {
  explicit TrialSubject(const char* subject);
  const char* name;
};

class Trial {
 public:
  // The number of the candidate to use: that with the shortest of kTrialTimings times, each taken on a stream
  // that is held while the host works. A candidate that returns false, throws CudaError or lacks memory is
  // not chosen; after an error, which may be of this run alone, nothing is kept for later processes.
  // Candidate 0 if all fail. UserError for a forced name that cannot run, CudaError if the GPU is lost.
  static std::size_t pick(const std::string& key, std::span<const TrialCandidate> candidates);

  // train.trial, "KEY=NAME;KEY=NAME...": the context's trials whose key begins with KEY pick NAME, untimed.
  // Throws UserError for other text, and for a KEY that does not begin with a subject.
  static void force(const std::string& choices);
};

}  // namespace topknot::cuda
