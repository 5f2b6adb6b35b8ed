// EF21 (Richtarik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
// error feedback", NeurIPS 2021, algorithm 2): each rank keeps an estimate h of its own gradient, sends the
// compressed difference C(g - h), and adds what it sent to h. The step follows the average of the estimates,
// which moves by the average of what was sent. The first step sends the whole gradient (h_0 = g_0).
//
// Unlike classic error feedback, what is not sent is not summed up over the steps, and ranks whose gradients
// differ do not keep each other from converging; in return the estimate is dense and every rank holds it.
//
// The arena's residual holds -h, so that the selection's own pass makes u = g - h; the average estimate is
// the memory's own buffer, equal on all ranks. Entries that the collective rejected stay out of h, as they
// stay out of the average. What a value codec loses stays in the difference. The optimizer applies momentum.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "compress/memory/memory.h"
#include "compress/parallel.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

class Ef21Memory final : public Memory {
 public:
  Ef21Memory() : Memory(false) {}

  FeedbackInput input(std::span<float> gradient, std::span<const float> residual) override {
    TOPKNOT_CHECK(residual.size() == gradient.size(), "ef21 needs a residual as long as the gradient");
    if (!first_ && estimate_.size() != gradient.size())
      StateReader::fail("has an estimate of " + std::to_string(estimate_.size()) + " values where " +
                        std::to_string(gradient.size()) + " are needed");
    estimate_.reserve(gradient.size());  // for finish()
    FeedbackInput input(residual);
    input.every_entry = first_;
    return input;
  }

  void commit(std::span<float>, std::span<float> residual, const SparseView& sent,
              std::span<const std::uint32_t> rejected) override {
    take_sent(residual, sent, rejected);
    first_ = false;
  }

  void finish(std::span<float> average) override {
    estimate_.resize(average.size());
    for_parts(average.size(), part_count(average.size()),
              [&](std::size_t, std::size_t begin, std::size_t end) {
                float* const estimate = estimate_.data();
                float* const mean = average.data();
                for (std::size_t i = begin; i < end; ++i) {
                  estimate[i] += mean[i];
                  mean[i] = estimate[i];
                }
              });
  }

  float largest_kept(std::span<const SparseView> sent) const override {
    float largest = 0;
    if (first_) return largest;
    for (const SparseView& from : sent)
      for (const std::uint32_t index : from.indices) largest = std::max(largest, std::abs(estimate_[index]));
    return largest;
  }
  void save(StateWriter& writer) const override {
    writer.put<std::uint8_t>(first_);
    writer.put_list(estimate_);
  }

  void load(StateReader& reader) override {
    const auto first = reader.get<std::uint8_t>();
    estimate_ = reader.get_finite_list<float>();
    if (first > 1 || (first == 1 && !estimate_.empty())) StateReader::fail("is not ef21's");
    if (first == 0 && reader.range > 0 && estimate_.size() != reader.range)
      StateReader::fail("has an estimate of another length");
    first_ = first == 1;
  }

 private:
  bool first_ = true;  // no step was committed yet
  // The weighted mean of all ranks' h after the last committed step; empty before the first.
  std::vector<float> estimate_;
};

const bool ef21_registered = add_memory<Ef21Memory>(
    "ef21", "differences to an estimate of the gradient are sent; the estimate is stepped along",
    {.sends_differences = true, .depends_on_lr = "the estimate of the gradient"});

}  // namespace
}  // namespace topknot
