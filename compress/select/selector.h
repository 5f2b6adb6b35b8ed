#pragma once
// Selection: which entries of the accumulated gradient are sent. One selector a selection range (a tensor, or
// a whole group) and rank. It drives the one pass over the data: it knows what to learn in that pass.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/memory.h"
#include "compress/select/passes/keys.h"
#include "nn/base/registry.h"

namespace topknot {

// The entries of one range that are sent: positions are relative to the range.
struct Selection : SparseVector {
  // The magnitude threshold: topk's k-th magnitude, gaussiank's last threshold.
  double threshold = 0;
};

struct SelectStep {
  std::size_t k = 1;     // SelectorTraits::target(density, range), at most the range's length
  double density = 1.0;  // in (0, 1]
  std::int64_t step = 0;
  int rank = 0;
  std::size_t position = 0;  // of the range's first element in the arena: numbers its random streams
};

// How the last select() came to its entries, as far as a selection tells; for tests and benchmarks.
struct SelectDiagnostics {
  struct Evaluation {
    double threshold = 0;
    std::size_t count = 0;  // entries that exceed it
  };
  std::vector<Evaluation> trace = {};  // the thresholds that were tried, in order
  std::size_t candidates = 0;          // entries that the pass which adds the residual listed
  int passes = 0;                      // reads of the vector
  bool exact = false;                  // the k largest of the vector, where the method's own way led nowhere
  CarriedBound carried = {};           // as committed
};

// The outcome of a selection, for selectors that learn from it (RegTop-k).
struct SelectOutcome {
  SparseView accepted;             // of what was selected and sent; values as the other ranks decoded them
  std::span<const float> average;  // the range's average
  double weight = 1;               // of this rank in the average: weight[rank] / P
};

class Selector {
 public:
  virtual ~Selector() = default;
  // Adds to u in place what the memory says, and selects from the sum. u is not empty. The result depends on
  // the data, the step and saved state of earlier commits, never on the number of threads.
  virtual void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                      Selection& selected) = 0;
  // Keeps or forgets what the last select() learnt. commit() allocates nothing that select() can.
  virtual void commit(const SelectOutcome&) {}
  virtual void discard() {}
  virtual void save(StateWriter&) const {}
  virtual void load(StateReader&) {}
  virtual SelectDiagnostics diagnostics() const { return {}; }
};

struct SelectorTraits {
  bool at_most_k = false;  // select() never selects more than SelectStep::k
  // commit() compares what was sent with what the average made of it; else SelectOutcome::accepted is empty.
  bool reads_average = false;
  // How many of d entries a density asks for: k = max(1, floor(density * d)) unless the paper has another.
  std::size_t (*target)(double density, std::size_t d, const CompressOptions& options) =
      [](double density, std::size_t d, const CompressOptions&) { return target_count(density, d); };
  // Throws UserError for options without sense that their own ranges allow.
  void (*check)(const CompressOptions& options) = nullptr;
};
struct SelectorFactory {
  std::unique_ptr<Selector> (*make)(const CompressOptions& options);
  SelectorTraits traits;
};
Registry<SelectorFactory>& selectors();  // compress.select
inline std::unique_ptr<Selector> make_selector(const std::string& name, const CompressOptions& options = {}) {
  return selectors().find(name).make(options);
}

template <class Implementation>
bool add_selector(const std::string& name, const std::string& help, SelectorTraits traits = {},
                  std::vector<Option> options = {}) {
  return selectors().add(name, help, {make_piece<Selector, Implementation>, traits}, std::move(options));
}

// compress.threshold, of selection `threshold` and its kernels. UserError unless finite and above 0.
double fixed_threshold(const CompressOptions& options);

// Keeps the `count` largest magnitudes of `selected`, ties to the lower index; the rest stays where it was.
void keep_largest(Selection& selected, std::size_t count);

}  // namespace topknot
