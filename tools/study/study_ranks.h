#pragma once
// The ranks of a study in one thread: the shipped compressors, whose blocks arrive at once.

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "nn/base/check.h"

namespace topknot {

class StudyRanks {
 public:
  // options.name: a sparse method with exact values, or dense: the plain average.
  StudyRanks(const CompressOptions& options, std::size_t numel, int ranks)
      : gradient_(static_cast<std::size_t>(ranks), std::vector<float>(numel)),
        residual_(gradient_),
        sent_(gradient_.size()) {
    if (options.name == "dense") {
      dense_.resize(numel);
      return;
    }
    const GroupSpec group{numel, {{0, numel}}, ranks};
    for (int r = 0; r < ranks; ++r) compressors_.push_back(make_compressor(options, group));
  }

  std::size_t size() const { return gradient_.size(); }
  // Where rank r's gradient goes before step().
  std::span<float> gradient(std::size_t r) { return gradient_[r]; }
  // One step; returns the average, until the next step. Throws Error where a gradient is not finite.
  std::span<const float> step(double density) {
    if (compressors_.empty()) return average_all();
    std::vector<std::vector<std::byte>> blocks;
    for (std::size_t r = 0; r < size(); ++r) {
      StepContext info;
      info.step = number_;
      info.density = density;
      info.rank = static_cast<int>(r);
      blocks.push_back(compressors_[r]->encode({gradient_[r], residual_[r]}, info).block);
      sent_[r] = *compressors_[r]->entries();
    }
    ++number_;
    for (std::size_t r = 0; r < size(); ++r) {
      Round round;
      round.blocks = blocks;
      compressors_[r]->decode(round);
      TOPKNOT_CHECK(compressors_[r]->finite(), "a gradient that is not finite");
      if (compressors_[r]->commit({}).data() == residual_[r].data()) std::swap(gradient_[r], residual_[r]);
    }
    return gradient_[0];
  }
  // Of the last step, by rank; without entries where the method is dense.
  const std::vector<SparseVector>& sent() const { return sent_; }

 private:
  std::span<const float> average_all() {
    std::fill(dense_.begin(), dense_.end(), 0.0f);
    for (const auto& gradient : gradient_)
      for (std::size_t j = 0; j < dense_.size(); ++j) dense_[j] += gradient[j];
    for (float& x : dense_) x *= 1.0f / static_cast<float>(size());
    return dense_;
  }

  std::vector<std::vector<float>> gradient_, residual_;
  std::vector<std::unique_ptr<Compressor>> compressors_;  // empty: dense
  std::vector<SparseVector> sent_;
  std::vector<float> dense_;
  std::int64_t number_ = 0;
};

}  // namespace topknot
