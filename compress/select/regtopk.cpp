#include "compress/select/regtopk.h"

#include <algorithm>
#include <cmath>

#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {

namespace {

const Option kMu{.name = "mu",
                 .standard = 4.0,
                 .help = "temperature of the regulariser",
                 .least = 0,
                 .greatest = 1e9,
                 .above = true};
const Option kQ{.name = "q",
                .standard = 1e8,
                .help = "distortion of what was not sent last",
                .least = 0,
                .greatest = 1e30,
                .above = true};
const Option kVariant{.name = "variant",
                      .standard = "A",
                      .help = "distortion relative to what was sent last (A) or to the current gradient (B)",
                      .choices = {"A", "B"}};

}  // namespace

RegTopKScore regtopk_score(const CompressOptions& options) {
  const double mu = options.get<double>(kMu), q = options.get<double>(kQ);
  return {mu, std::tanh((1 + q) / mu), options.get<std::string>(kVariant) == "B"};
}

float RegTopKSelector::score(std::size_t i, float u) const {
  return rule_(u, last_.weight, last_.own[i], last_.surplus[i], std::numeric_limits<float>::max());
}

// Puts scores over the listed values and drops what does not exceed `above`.
void RegTopKSelector::score_candidates(MagnitudeKey above) {
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
MagnitudeKey RegTopKSelector::select_from_scores(std::span<float> u, std::size_t k, Selected& selected) {
  std::vector<float> kept(last_.indices.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    kept[i] = u[last_.indices[i]];
    u[last_.indices[i]] = score(i, kept[i]);
  }
  const MagnitudeKey kth = select_exact(u, k, found_, selected);
  for (std::size_t i = 0; i < kept.size(); ++i) u[last_.indices[i]] = kept[i];
  return kth;
}

void RegTopKSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                             Selected& selected) {
  TOPKNOT_CHECK(step.k >= 1 && step.k <= u.size(), "k outside 1 to the vector's length");
  TOPKNOT_CHECK(last_.indices.empty() || last_.indices.back() < u.size(),
                "last step's entries lie beyond the vector");
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

void RegTopKSelector::commit(const SelectOutcome& outcome) {
  TOPKNOT_CHECK(outcome.sent.size() == outcome.indices.size(), "one value an entry sent");
  bound_ = next_bound_;
  const std::size_t count = outcome.indices.size();
  last_.indices.assign(outcome.indices.begin(), outcome.indices.end());
  last_.own.resize(count);
  last_.surplus.resize(count);
  last_.weight = outcome.weight;
  for (std::size_t i = 0; i < count; ++i) {
    last_.own[i] = outcome.weight * static_cast<double>(outcome.sent[i]);
    last_.surplus[i] = static_cast<double>(outcome.average[outcome.indices[i]]) - last_.own[i];
  }
}

void RegTopKSelector::discard() {
  next_bound_ = bound_;
}

void RegTopKSelector::save(StateWriter& writer) const {
  writer.put_list(last_.indices);
  writer.put_list(last_.own);
  writer.put_list(last_.surplus);
  writer.put(last_.weight);
}

void RegTopKSelector::load(StateReader& reader) {
  Last last;
  last.indices = reader.get_list<std::uint32_t>();
  last.own = reader.get_list<double>(last.indices.size());
  last.surplus = reader.get_list<double>(last.indices.size());
  last.weight = reader.get<double>();
  if (std::adjacent_find(last.indices.begin(), last.indices.end(), std::greater_equal<>()) !=
      last.indices.end())
    StateReader::fail("names the entries of regtopk's last step out of order");
  last_ = std::move(last);
}

namespace {

const bool regtopk_registered = [] {
  add_selector<RegTopKSelector>(
      "regtopk", "exactly k entries, magnitudes weighted by what the last average kept of them",
      {.at_most_k = true, .reads_average = true}, {kMu, kQ, kVariant});
  add_sparse("regtopk", "Top-k regularised by what the last average kept of each entry; error feedback",
             {.select = "regtopk"});
  return true;
}();

}  // namespace
}  // namespace topknot
