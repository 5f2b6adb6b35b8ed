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
// so that for A |1 + Delta_j| is how much of the own contribution survived the average: 0 if the others
// cancelled it. Delta_j = Q for every other entry, where D_j is 0, and everywhere in the first step, which is
// plain Top-k. The authors' scripts use A in the toy, regression and ResNet experiments and B in the
// ImageNette notebook; only A converges where their claim is made (lab/records/studies/regtopk-regression.md).
//
// The scores are held relative to tanh((1 + Q) / mu), the common factor of all entries that were not sent:
// theirs is |u_j| as it is, the others' is computed in double and rounded to float. That is the paper's
// order, and if the factor rounds to 1, as for every sensible Q, the paper's score. One rank alone has Delta
// = 0, thus tanh(1 / mu): RegTop-k of one rank is not Top-k.
//
// One pass in steady state, as for Top-k (compress/select/passes/keys.h, of scores here): the pass that adds
// the residual lists what may exceed the bound, and up to k listed entries are scored. Else radix selection.

#include <algorithm>
#include <cmath>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "compress/select/regtopk_score.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

const Option kMu{"mu", 4.0, "temperature of the regulariser", 0, 1e9, true};
const Option kQ{"q", 1e8, "distortion of what was not sent last", 0, 1e30, true};
const Option kVariant{.name = "variant",
                      .standard = "A",
                      .help = "distortion relative to what was sent last (A) or to the current gradient (B)",
                      .choices = {"A", "B"}};

class RegTopKSelector final : public Selector {
 public:
  explicit RegTopKSelector(const CompressOptions& options) : rule_(regtopk_score(options)) {}

  // selected.threshold is the k-th score, tanh((1 + Q) / mu) included; 0 if all entries are sent.
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    TOPKNOT_CHECK(last_.indices.empty() || last_.indices.back() < u.size(),
                  "last step's entries lie beyond the vector");
    // For commit(), of k entries at most.
    last_.indices.reserve(step.k);
    last_.own.reserve(step.k);
    last_.surplus.reserve(step.k);
    next_bound_ = bound_;
    fell_back_ = false;
    const bool all = step.k == u.size();
    const MagnitudeKey above = bound_.above(all), listed_above = rule_.listed_above(bound_, all);
    accumulate_and_collect(u, input, listed_above, list_limit(step.k), found_);
    if (!begin_selection(found_.finite(), selected)) return;
    if (all) {
      select_all(u, selected);
      return;
    }
    if (found_.complete()) score_candidates(above);
    const ListState list = list_state(found_.complete(), found_.count(), step.k);
    fell_back_ = list != ListState::good;
    const MagnitudeKey kth =
        fell_back_ ? select_from_scores(u, step.k, selected) : select_from(found_, above, step.k, selected);
    for (std::size_t i = 0; i < step.k; ++i) selected.values[i] = u[selected.indices[i]];
    selected.threshold = rule_.rest * static_cast<double>(magnitude_of(kth));
    next_bound_ = bound_.after(kth, list);
  }

  void commit(const SelectOutcome& outcome) override {
    const std::span<const std::uint32_t> indices = outcome.accepted.indices;
    const std::span<const float> sent = outcome.accepted.values;
    TOPKNOT_CHECK(sent.size() == indices.size(), "one value an entry sent");
    bound_ = next_bound_;
    const std::size_t count = indices.size();
    last_.indices.assign(indices.begin(), indices.end());
    last_.own.resize(count);
    last_.surplus.resize(count);
    last_.weight = outcome.weight;
    for (std::size_t i = 0; i < count; ++i) {
      last_.own[i] = outcome.weight * static_cast<double>(sent[i]);
      last_.surplus[i] = static_cast<double>(outcome.average[indices[i]]) - last_.own[i];
    }
  }

  void discard() override { next_bound_ = bound_; }

  void save(StateWriter& writer) const override {
    writer.put_list(last_.indices);
    writer.put_list(last_.own);
    writer.put_list(last_.surplus);
    writer.put(last_.weight);
  }

  void load(StateReader& reader) override {
    Last last;
    last.indices = reader.get_list<std::uint32_t>();
    last.own = reader.get_finite_list<double>();
    last.surplus = reader.get_finite_list<double>();
    last.weight = reader.get<double>();
    if (last.own.size() != last.indices.size() || last.surplus.size() != last.indices.size() ||
        !std::isfinite(last.weight))
      StateReader::fail("has no valid entries of regtopk's last step");
    if (std::adjacent_find(last.indices.begin(), last.indices.end(), std::greater_equal<>()) !=
        last.indices.end())
      StateReader::fail("names the entries of regtopk's last step out of order");
    if (reader.range > 0 && !last.indices.empty() && last.indices.back() >= reader.range)
      StateReader::fail("names entries of regtopk's last step beyond the vector");
    last_ = std::move(last);
  }

  SelectDiagnostics diagnostics() const override { return {.exact = fell_back_}; }

 private:
  // The entries sent in the last committed step, by ascending index.
  struct Last {
    std::vector<std::uint32_t> indices;
    std::vector<double> own;      // w p
    std::vector<double> surplus;  // avg - w p
    double weight = 0;            // w
  };

  // The score of the i-th entry of last_, with the sign of u.
  float score(std::size_t i, float u) const {
    return rule_(u, last_.weight, last_.own[i], last_.surplus[i], std::numeric_limits<float>::max());
  }

  // Puts scores over the listed values and drops what does not exceed `above`.
  void score_candidates(MagnitudeKey above) {
    std::size_t at = 0;
    const std::size_t last = last_.indices.size();
    for (auto& part : found_.parts) {
      std::size_t n = 0;
      for (std::size_t i = 0; i < part.count; ++i) {
        const std::uint32_t index = part.index[i];
        float value = part.value[i];
        while (at < last && last_.indices[at] < index) ++at;
        if (at < last && last_.indices[at] == index) value = score(at, value);
        part.index[n] = index;
        part.value[n] = value;
        n += key_of(value) > above;
      }
      part.count = n;
    }
  }

  // Radix selection sees scores where last step's entries are, for as long as it takes.
  MagnitudeKey select_from_scores(std::span<float> u, std::size_t k, Selection& selected) {
    std::vector<float> kept(last_.indices.size());
    for (std::size_t i = 0; i < kept.size(); ++i) {
      kept[i] = u[last_.indices[i]];
      u[last_.indices[i]] = score(i, kept[i]);
    }
    const MagnitudeKey kth = select_exact(u, k, found_, selected);
    for (std::size_t i = 0; i < kept.size(); ++i) u[last_.indices[i]] = kept[i];
    return kth;
  }

  RegTopKScore rule_;
  Last last_;
  CarriedBound bound_, next_bound_;
  Candidates found_;
  bool fell_back_ = false;  // to radix selection
};

const bool regtopk_registered[] = {
    add_selector<RegTopKSelector>(
        "regtopk", "exactly k entries, magnitudes weighted by what the last average kept of them",
        {.at_most_k = true, .reads_average = true}, {kMu, kQ, kVariant}),
    add_sparse("regtopk", "Top-k regularised by what the last average kept of each entry; error feedback",
               {.select = "regtopk", .settings = {{"compress.dense_1d", "false"}}})};

}  // namespace

RegTopKScore regtopk_score(const CompressOptions& options) {
  const double mu = options.get<double>(kMu), q = options.get<double>(kQ);
  return {mu, std::tanh((1 + q) / mu), options.get<std::string>(kVariant) == "B"};
}

}  // namespace topknot
