#pragma once
// RegTop-k: the k largest scores |u_j| * tanh(|1 + Delta_j| / mu), exactly k, ties to the lower index.
// Bereyhi, Liang, Boudreau, Afana: "Regularized Top-k", arXiv 2409.14893 (MLSP 2024) and 2501.05633, after
// the code of the authors (github.com/AlBerey/RegTopK).
//
// For an entry that this rank sent in the last committed step, with p the value sent, w this rank's weight in
// the average (weight / ranks) and avg the average there,
//
//   Delta_j = (avg_j - w p_j) / D_j,   D_j = w p_j              variant A (default)
//                                      D_j = w u_j + 1e-10     variant B
//
// so that for A |1 + Delta_j| is how much of the own contribution survived the average: 0 where the others
// cancelled it. Delta_j = Q for every other entry, where D_j is 0, and everywhere in the first step, which
// is plain Top-k. The authors' scripts use A in the toy, regression and ResNet experiments and B in the
// ImageNette notebook; only A converges where their claim is made (docs/studies/regtopk-regression.md).
//
// The scores are held relative to tanh((1 + Q) / mu), the common factor of all entries that were not sent:
// theirs is |u_j| as it is, the others' is computed in double and rounded to float. That is the paper's order,
// and where the factor rounds to 1, as for every sensible Q, the paper's score. One rank alone has Delta = 0,
// thus tanh(1 / mu): RegTop-k of one rank is not Top-k.
//
// One pass in steady state, as for Top-k (compress/select/passes/carried_bound.h, of scores here): the pass that adds
// the residual lists what may exceed the bound, and at most k listed entries are scored anew. Otherwise radix
// selection over the scores.

#include "compress/select/passes/carried_bound.h"
#include "compress/select/passes/passes.h"
#include "compress/select/regtopk_score.h"
#include "compress/select/selector.h"

namespace topknot {

// compress.mu, .q and .variant. Throws UserError for values outside their ranges.
RegTopKScore regtopk_score(const CompressOptions& options);

class RegTopKSelector final : public Selector {
 public:
  explicit RegTopKSelector(const CompressOptions& options) : rule_(regtopk_score(options)) {}

  // selected.threshold is the k-th score, tanh((1 + Q) / mu) included; 0 where all entries are sent.
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;
  void commit(const SelectOutcome& outcome) override;
  void discard() override;
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

  // Of the last select(): whether the answer had to come from radix selection.
  bool fell_back() const { return fell_back_; }

 private:
  // The entries sent in the last committed step, by ascending index.
  struct Last {
    std::vector<std::uint32_t> indices;
    std::vector<double> own;      // w p
    std::vector<double> surplus;  // avg - w p
    double weight = 0;            // w
  };

  float score(std::size_t i, float u) const;  // of the i-th entry of last_, with the sign of u
  void score_candidates(MagnitudeKey above);
  MagnitudeKey select_from_scores(std::span<float> u, std::size_t k, Selected& selected);

  RegTopKScore rule_;
  Last last_;
  CarriedBound bound_, next_bound_;
  Candidates found_;
  bool fell_back_ = false;
};

}  // namespace topknot
