#pragma once
// EF21 (Richtarik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
// error feedback", NeurIPS 2021, algorithm 2): each rank keeps an estimate h of its own gradient, sends the
// compressed difference C(g - h), and adds what it sent to h. The step follows the average of the estimates,
// which moves by the average of what was sent. The first step sends the whole gradient (h_0 = g_0).
//
// Unlike classic error feedback, what is not sent is not summed up over the steps, and ranks whose gradients
// differ do not keep each other from converging; in return the estimate is dense and every rank holds it.
//
// The arena's residual holds -h, so that the selection's own pass makes u = g - h; the average estimate is the
// memory's own buffer, equal on all ranks. Entries that the collective rejected stay out of h, as they stay
// out of the average. What a value codec loses stays in the difference. Momentum, if any, is the optimizer's.

#include <vector>

#include "compress/memory/memory.h"

namespace topknot {

class Ef21Memory final : public Memory {
 public:
  FeedbackInput input(std::span<float> gradient, std::span<const float> spare) override;
  void commit(std::span<float> u, std::span<float> spare, std::span<const std::uint32_t> indices,
              std::span<const float> sent, std::span<const std::uint32_t> rejected) override;
  void finish(std::span<float> average) override;
  bool has_residual() const override { return false; }
  bool requires_dense_step() const override { return first_; }
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

  // The weighted mean of all ranks' h after the last committed step; empty before the first.
  std::span<const float> estimate() const { return estimate_; }

 private:
  bool first_ = true;  // no step was committed yet
  std::vector<float> estimate_;
};

}  // namespace topknot
