#include "compress/sparse_step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compress/parallel.h"
#include "compress/select/passes/passes.h"
#include "compress/select/passes/take.h"
#include "compress/state.h"
#include "nn/core/base/check.h"
#include "nn/core/base/text.h"
#include "nn/core/simd.h"

namespace topknot {

namespace {

double density_of(const GroupSpec& group, std::size_t segment, double density) {
  return group.densities.empty() ? density : std::max(density, group.densities[segment]);
}

}  // namespace

template <class T>
SparseStep<T>::SparseStep(const SparsePreset& parts, const CompressOptions& options, const GroupSpec& group)
    : group_(group), capacity_(options.capacity) {
  check_combination(parts, options);
  const SelectorFactory& selector = selectors().find(parts.select);
  const MemoryFactory& memory = memories().find(parts.memory);
  traits_ = selector.traits;
  TOPKNOT_CHECK(group_.densities.empty() || group_.densities.size() == group_.segments.size(),
                "one density per segment");
  for (std::size_t s = 0; s < group_.segments.size(); ++s) selectors_.push_back(selector.make<T>(options));
  memory_ = memory.make<T>(options);
  if (memory.traits.owns_momentum) form_ = GradientForm::has_momentum;
  if (options.lr_inside) form_ = GradientForm::has_lr;
}

template <class T>
const Entries<T>& SparseStep<T>::encode(std::span<T> gradient, std::span<T> spare, const StepInfo& info) {
  TOPKNOT_CHECK(!in_step_, "encode before the last step was committed or discarded");
  TOPKNOT_CHECK(gradient.size() == group_.numel, "a slice of another length than the group's");
  TOPKNOT_CHECK(info.weights.empty() || info.weights.size() == static_cast<std::size_t>(group_.ranks),
                "one weight per rank");
  TOPKNOT_CHECK(info.rank >= 0 && info.rank < group_.ranks, "rank outside the group");
  gradient_ = gradient;
  spare_ = spare;
  rank_ = info.rank;
  weights_.assign(info.weights.begin(), info.weights.end());
  if (std::is_same_v<T, double> && !info.unrounded_weights.empty())
    weights_.assign(info.unrounded_weights.begin(), info.unrounded_weights.end());
  weights_.resize(static_cast<std::size_t>(group_.ranks), 1.0);
  if (form_ == GradientForm::has_lr)
    for_parts(gradient.size(), part_count(gradient.size()),
              [&](std::size_t, std::size_t begin, std::size_t end) {
                multiply(gradient.data() + begin, end - begin, static_cast<T>(info.lr));
              });
  const Addend<T> addend = memory_->addend(gradient, spare);

  sent_.finite = true;
  sent_.indices.clear();
  sent_.values.clear();
  cuts_.clear();
  threshold_ = group_.segments.empty() ? 0 : std::numeric_limits<double>::infinity();
  over_capacity_ = 0;
  all_ = memory_->requires_dense_step();
  for (std::size_t s = 0; s < group_.segments.size(); ++s) {
    const auto [begin, end] = group_.segments[s];
    const Addend<T> added = addend.part(begin, end - begin);
    if (all_)
      take_all(s, added);
    else
      select(s, added, info);
    sent_.finite &= selected_.finite;
    if (selected_.finite) threshold_ = std::min(threshold_, selected_.threshold);
    const std::size_t first = sent_.indices.size();
    for (const std::uint32_t index : selected_.indices)
      sent_.indices.push_back(index + static_cast<std::uint32_t>(begin));
    sent_.values.insert(sent_.values.end(), selected_.values.begin(), selected_.values.end());
    cuts_.emplace_back(first, sent_.indices.size());
  }
  if (!sent_.finite) {
    sent_.indices.clear();
    sent_.values.clear();
    threshold_ = 0;
  }
  in_step_ = true;
  return sent_;
}

template <class T>
void SparseStep<T>::select(std::size_t segment, const Addend<T>& addend, const StepInfo& info) {
  const auto [begin, end] = group_.segments[segment];
  Selector<T>& selector = *selectors_[segment];
  SelectStep step;
  step.density = density_of(group_, segment, info.density);
  step.k = traits_.target(step.density, end - begin);
  step.step = info.step;
  step.rank = info.rank;
  step.position = group_.offset + begin;
  selector.select(gradient_.subspan(begin, end - begin), addend, step, selected_);
  if (capacity_ == 0) return;
  const double bound = capacity_ * static_cast<double>(step.k);
  const std::size_t count = selected_.indices.size();
  if (static_cast<double>(count) > bound) keep_largest(selected_, static_cast<std::size_t>(bound));
  over_capacity_ += count - selected_.indices.size();
}

template <class T>
void SparseStep<T>::take_all(std::size_t segment, const Addend<T>& addend) {
  const auto [begin, end] = group_.segments[segment];
  const std::span<T> u = gradient_.subspan(begin, end - begin);
  Candidates<T> broken;
  accumulate_and_collect(u, addend, largest_finite_key<T>(), 0, broken);
  if (begin_selection(broken.finite(), selected_)) select_all(std::span<const T>(u), selected_);
}

template <class T>
std::span<T> SparseStep<T>::commit(std::span<const Entries<T>> received, const Outcome& outcome) {
  TOPKNOT_CHECK(in_step_ && sent_.finite, "commit without a finite step");
  TOPKNOT_CHECK(received.size() == static_cast<std::size_t>(group_.ranks), "one rank's entries each");
  const Entries<T>& own = received[static_cast<std::size_t>(rank_)];
  TOPKNOT_CHECK(own.indices.size() == sent_.indices.size(), "this rank's own entries came back changed");
  std::vector<Contribution<T>> contributions(received.size());
  for (std::size_t r = 0; r < received.size(); ++r)
    contributions[r] = {received[r].indices, received[r].values, static_cast<T>(weights_[r])};
  return finish(own, contributions, outcome);
}

template <class T>
std::span<T> SparseStep<T>::commit_sum(const Entries<T>& sum, const Outcome& outcome) {
  TOPKNOT_CHECK(in_step_ && sent_.finite && sum.finite, "commit without a finite step");
  // The average divides by how many contribute.
  std::vector<Contribution<T>> contributions(static_cast<std::size_t>(group_.ranks));
  contributions[0] = {sum.indices, sum.values, T{1}};
  return finish(sent_, contributions, outcome);
}

template <class T>
std::span<T> SparseStep<T>::finish(const Entries<T>& own, std::span<const Contribution<T>> contributions,
                                   const Outcome& outcome) {
  memory_->commit(gradient_, spare_, own.indices, own.values, outcome.rejected);

  const std::span<T> average = memory_->has_residual() ? spare_ : gradient_;
  average_sparse<T>(contributions, average);

  // For a selection that learns from the average, rejected entries were not sent.
  std::vector<std::uint32_t> rejected(outcome.rejected.begin(), outcome.rejected.end());
  std::sort(rejected.begin(), rejected.end());
  std::vector<std::uint32_t> relative;
  std::vector<T> accepted;
  for (std::size_t s = 0; s < group_.segments.size() && !all_; ++s) {
    const auto [begin, end] = group_.segments[s];
    const auto [first, last] = cuts_[s];
    SelectOutcome<T> result;
    result.sent = std::span(own.values).subspan(first, last - first);
    relative.assign(own.indices.begin() + static_cast<std::ptrdiff_t>(first),
                    own.indices.begin() + static_cast<std::ptrdiff_t>(last));
    if (!rejected.empty()) {
      accepted.clear();
      relative.clear();
      for (std::size_t i = first; i < last; ++i) {
        if (std::binary_search(rejected.begin(), rejected.end(), own.indices[i])) continue;
        relative.push_back(own.indices[i]);
        accepted.push_back(own.values[i]);
      }
      result.sent = accepted;
    }
    for (std::uint32_t& index : relative) index -= static_cast<std::uint32_t>(begin);
    result.indices = relative;
    result.average = average.subspan(begin, end - begin);
    result.weight = weights_[static_cast<std::size_t>(rank_)] / group_.ranks;
    selectors_[s]->commit(result);
  }
  memory_->finish(average);
  in_step_ = false;
  return average;
}

template <class T>
bool SparseStep<T>::summable(std::span<const Entries<T>> received) const {
  double bound = 0;
  for (std::size_t r = 0; r < received.size(); ++r) {
    Key<T> largest = 0;
    for (const T value : received[r].values) largest = std::max(largest, key_of(value));
    bound += weights_[r] * static_cast<double>(magnitude_of<T>(largest));
  }
  return bound <= static_cast<double>(std::numeric_limits<T>::max());
}

template <class T>
void SparseStep<T>::discard() {
  if (!all_)
    for (auto& selector : selectors_) selector->discard();
  memory_->discard();
  in_step_ = false;
}

template <class T>
void SparseStep<T>::save(StateWriter& writer) const {
  TOPKNOT_CHECK(!in_step_, "state is saved between steps");
  writer.put<std::uint64_t>(group_.numel);
  writer.put<std::uint64_t>(selectors_.size());
  for (const auto& selector : selectors_) selector->save(writer);
  memory_->save(writer);
}

template <class T>
void SparseStep<T>::load(StateReader& reader) {
  TOPKNOT_CHECK(!in_step_, "state is loaded between steps");
  reader.expect_group(group_.numel, selectors_.size());
  for (auto& selector : selectors_) selector->load(reader);
  memory_->load(reader);
}

template class SparseStep<float>;
template class SparseStep<double>;

Registry<SparsePreset>& sparse_presets() {
  static Registry<SparsePreset> registry("sparse method (compress.name)");
  return registry;
}

SparsePreset resolve(const SparsePreset& preset, const CompressOptions& options) {
  SparsePreset parts = preset;
  if (!options.select.empty()) parts.select = options.select;
  if (!options.memory.empty()) parts.memory = options.memory;
  if (!options.codec.empty()) parts.codec = options.codec;
  if (!options.values.empty()) parts.values = options.values;
  return parts;
}

std::optional<SparsePreset> pieces_of(const CompressOptions& options) {
  if (!sparse_presets().contains(options.name)) return std::nullopt;
  return resolve(sparse_presets().find(options.name), options);
}

std::size_t planned_entries(const SelectorTraits& traits, const GroupSpec& group, double density) {
  std::size_t count = 0;
  for (std::size_t s = 0; s < group.segments.size(); ++s)
    count += traits.target(density_of(group, s, density), group.segments[s].second - group.segments[s].first);
  return count;
}

void check_combination(const SparsePreset& parts, const CompressOptions& options) {
  if (options.capacity != 0 && !(options.capacity >= 1 && std::isfinite(options.capacity)))
    throw UserError("compress.capacity is " + short_text(options.capacity) +
                    ": it must be none, or a multiple of k of at least 1, because less would cut what the "
                    "density asks for");
  const SelectorTraits& selection = selectors().find(parts.select).traits;
  if (selection.check) selection.check(options);
  const auto refuse = [](const std::string& a, const std::string& b, const std::string& reason) {
    throw UserError(a + " makes no sense with " + b + ": " + reason);
  };
  const std::string memory = "compress.memory: " + parts.memory;
  const MemoryTraits& kept = memories().find(parts.memory).traits;
  if (kept.sends_differences && selection.reads_average)
    refuse("compress.select: " + parts.select, memory,
           parts.select + " compares what it sent with what the average made of it, and " + parts.memory +
               " sends differences; use memory residual");
  if (!options.lr_inside) return;
  if (*kept.depends_on_lr)
    refuse("compress.lr_inside", memory,
           std::string(kept.depends_on_lr) + " would mix learning rates; use memory residual");
  if (options.momentum > 0)
    refuse("compress.lr_inside", "optimizer.momentum above 0",
           "LAGS-SGD has none: what is sent is a step, not a gradient; set optimizer.momentum to 0");
}

}  // namespace topknot
