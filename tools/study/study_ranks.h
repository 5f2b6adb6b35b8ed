#pragma once
// The ranks of a study in one thread, in float or double: the shipped selection, memory and average
// (compress/sparse_step.h), without a wire.

#include <algorithm>
#include <span>
#include <vector>

#include "compress/sparse_step.h"
#include "nn/core/base/check.h"

namespace topknot {

template <class T>
class StudyRanks {
 public:
  // options.name: a sparse method, or dense: the plain average.
  StudyRanks(const CompressOptions& options, std::size_t numel, int ranks)
      : gradient_(static_cast<std::size_t>(ranks), std::vector<T>(numel)),
        spare_(gradient_),
        sent_(gradient_.size()) {
    if (options.name == "dense") {
      dense_.resize(numel);
      return;
    }
    const SparsePreset parts = resolve(sparse_presets().find(options.name), options);
    const GroupSpec group{numel, {{0, numel}}, ranks};
    for (int r = 0; r < ranks; ++r) steps_.emplace_back(parts, options, group);
  }

  std::size_t size() const { return gradient_.size(); }
  // Where rank r's gradient goes before step().
  std::span<T> gradient(std::size_t r) { return gradient_[r]; }
  // One step; returns the average, until the next step. Throws Error where a gradient is not finite.
  std::span<const T> step(double density) {
    if (steps_.empty()) return average_all();
    for (std::size_t r = 0; r < size(); ++r) {
      StepInfo info;
      info.step = number_;
      info.density = density;
      info.rank = static_cast<int>(r);
      sent_[r] = steps_[r].encode(gradient_[r], spare_[r], info);
      TOPKNOT_CHECK(sent_[r].finite, "a gradient that is not finite");
    }
    ++number_;
    for (std::size_t r = 0; r < size(); ++r)
      if (steps_[r].commit(sent_, {}).data() == spare_[r].data()) std::swap(gradient_[r], spare_[r]);
    return gradient_[0];
  }
  // Of the last step, by rank; without entries where the method is dense.
  const std::vector<Entries<T>>& sent() const { return sent_; }

 private:
  std::span<const T> average_all() {
    std::fill(dense_.begin(), dense_.end(), T{0});
    for (const auto& gradient : gradient_)
      for (std::size_t j = 0; j < dense_.size(); ++j) dense_[j] += gradient[j];
    for (T& x : dense_) x *= T{1} / static_cast<T>(size());
    return dense_;
  }

  std::vector<std::vector<T>> gradient_, spare_;
  std::vector<SparseStep<T>> steps_;  // empty: dense
  std::vector<Entries<T>> sent_;
  std::vector<T> dense_;
  std::int64_t number_ = 0;
};

}  // namespace topknot
