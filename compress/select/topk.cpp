// The k largest magnitudes, exactly; ties go to the lower index. Zeros count as entries, so exactly k are
// selected. Preset topk is TopK-SGD with error feedback: Stich, Cordonnier, Jaggi, "Sparsified SGD with
// Memory", NeurIPS 2018; operator as in Shi et al., arXiv 1911.08772.
//
// One pass in steady state: the k-th magnitude of the last step, lowered by a margin, is a bound above which
// the k largest of this step nearly always lie (compress/select/passes/keys.h); the pass that adds the
// residual lists what exceeds it, and the k largest of the list are the answer. Fewer than k, or far too
// many: radix selection over the sum.

#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"

namespace topknot {
namespace {

class TopKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    next_ = carried_;
    const bool all = step.k == u.size();
    const MagnitudeKey above = carried_.above(all);
    accumulate_and_collect(u, input, above, list_limit(step.k), found_);
    candidates_ = found_.count();
    fell_back_ = false;
    if (!begin_selection(found_.finite(), selected)) return;
    if (all) {
      selected.threshold = select_all(u, selected);
      return;
    }
    const ListState list = list_state(found_.complete(), candidates_, step.k);
    fell_back_ = list != ListState::good;
    const MagnitudeKey kth =
        fell_back_ ? select_exact(u, step.k, found_, selected) : select_from(found_, above, step.k, selected);
    selected.threshold = magnitude_of(kth);
    next_ = carried_.after(kth, list);
  }

  void commit(const SelectOutcome&) override { carried_ = next_; }

  void discard() override { next_ = carried_; }

  SelectDiagnostics diagnostics() const override {
    return {.candidates = candidates_, .exact = fell_back_, .carried = carried_};
  }

 private:
  CarriedBound carried_, next_;
  Candidates found_;
  std::size_t candidates_ = 0;  // above the carried bound
  bool fell_back_ = false;      // to radix selection
};

const bool topk_registered[] = {
    add_selector<TopKSelector>("topk", "exactly k entries, the largest magnitudes; ties to the lower index",
                               {.at_most_k = true}),
    add_sparse("topk", "the k largest entries, exactly; error feedback keeps the rest", {.select = "topk"}),
    // LAGS-SGD: layer-wise top-k with error feedback and the learning rate inside. For layer l, rank p:
    //
    //   a_t = residual_{t-1} + lr_{t-1} * g_{t-1};  residual_t = a_t - TopK(a_t, k_l)
    //   w_t = w_{t-1} - (1/P) * sum_p TopK(a_t, k_l)
    //
    // Shi, Zhao, Wang, Tang, Chu, "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning
    // with Convergence Guarantees", ECAI 2020, arXiv 1911.08727, algorithm 1. This is topk under three keys:
    // compress.scope=tensor (each layer its own k), compress.lr_inside=true with optimizer.momentum=0 (false:
    // the authors' later code, which keeps the rate outside; the two differ wherever the rate changes), and
    // compress.layer_density for k adapted to each layer (train/plan/plan.h).
    add_sparse("lags", "LAGS-SGD: topk layer by layer (compress.scope=tensor), with compress.lr_inside",
               {.select = "topk",
                .layerwise = true,
                .settings = {{"compress.scope", "tensor"},
                             {"compress.dense_1d", "false"},
                             {"compress.lr_inside", "true"},
                             {"optimizer.momentum", "0"}}})};

}  // namespace
}  // namespace topknot
