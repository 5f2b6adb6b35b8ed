#pragma once
// A group's step as selection and memory make it, before and after the wire: which entries this rank sends,
// and what their average leaves behind. In float for training (compress/sparse_compressor.h puts codecs around
// it), in double for studies.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compress/average.h"
#include "compress/compressor.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"

namespace topknot {

// A method by its pieces. compress.select, .memory, .codec and .values override them one by one.
struct SparsePreset {
  std::string select, memory = "residual", codec = "raw", values = "fp32";
  bool layerwise = false;  // the method is defined layer by layer: compress.scope must be tensor
};
Registry<SparsePreset>& sparse_presets();  // compress.name, of methods that are such a combination

// The preset with the options' own choices in place.
SparsePreset resolve(const SparsePreset& preset, const CompressOptions& options);

// The pieces that the options name, or nothing where compress.name is no combination of pieces.
std::optional<SparsePreset> pieces_of(const CompressOptions& options);

// Throws UserError for unknown names, a combination that makes no sense, a capacity below 1.
void check_combination(const SparsePreset& parts, const CompressOptions& options);

// Entries that a density asks for, over the group's segments.
std::size_t planned_entries(const SelectorTraits& traits, const GroupSpec& group, double density);

template <class T>
class SparseStep {
 public:
  // Throws UserError as check_combination().
  SparseStep(const SparsePreset& parts, const CompressOptions& options, const GroupSpec& group);

  // What this rank sends. u is then in `gradient`. The entries live until the next encode().
  const Entries<T>& encode(std::span<T> gradient, std::span<T> spare, const StepInfo& info);
  // `received` by rank, as decoded, all finite, with this rank's positions as sent. Returns the average, in
  // the memory of gradient or of spare.
  std::span<T> commit(std::span<const Entries<T>> received, const Outcome& outcome);
  // The same, where the ranks' entries were added on their way: `sum` is their weighted sum, finite, without
  // what was rejected.
  std::span<T> commit_sum(const Entries<T>& sum, const Outcome& outcome);
  void discard();
  // Whether the sum of what was received cannot overflow; the same on all ranks. Where it can, the step is no
  // better than one with an infinity in it.
  bool summable(std::span<const Entries<T>> received) const;

  const Entries<T>& sent() const { return sent_; }
  double threshold() const { return threshold_; }               // the least over the segments
  std::size_t over_capacity() const { return over_capacity_; }  // entries that the capacity kept back
  std::size_t target(double density) const { return planned_entries(traits_, group_, density); }
  GradientForm form() const { return form_; }
  std::span<const T> accumulated() const { return gradient_; }  // u, between encode() and commit()

  void save(StateWriter& writer) const;
  void load(StateReader& reader);

 private:
  void select(std::size_t segment, const Addend<T>& addend, const StepInfo& info);
  void take_all(std::size_t segment, const Addend<T>& addend);
  std::span<T> finish(const Entries<T>& own, std::span<const Contribution<T>> contributions,
                      const Outcome& outcome);

  GroupSpec group_;
  SelectorTraits traits_;
  double capacity_ = 0;
  GradientForm form_ = GradientForm::plain;
  std::vector<std::unique_ptr<Selector<T>>> selectors_;  // one per segment
  std::unique_ptr<Memory<T>> memory_;

  bool in_step_ = false, all_ = false;  // all_: every entry is sent, the selectors were not asked
  std::span<T> gradient_, spare_;
  int rank_ = 0;
  std::vector<double> weights_;  // by rank
  Entries<T> sent_;
  std::vector<std::pair<std::size_t, std::size_t>> cuts_;  // each segment's entries in sent_
  Selected<T> selected_;                                   // scratch
  double threshold_ = 0;
  std::size_t over_capacity_ = 0;
};

}  // namespace topknot
