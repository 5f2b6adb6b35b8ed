#pragma once
// The memory of Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887, sections
// 3.1 and 3.2; Nesterov's form as in the authors' code, dgc/memory.py of
// synxlin/deep-gradient-compression): momentum is applied before the selection.
//
//   velocity = m velocity + g;        v = v + velocity            (optimizer.momentum m)
//   velocity = m (velocity + g);      v = v + (velocity + g)      (optimizer.nesterov)
//
// v is what is selected from, and what is kept. Momentum factor masking (compress.momentum_masking): the
// velocity of what was sent is zero; without it only v is. Thus at density 1 with masking nothing is left of
// momentum, and without it the average is torch.optim.SGD's direction bit for bit on one rank. What a value
// code loses stays in v; the velocity is zeroed all the same. Entries that the collective rejected keep both.
//
// v lives in the arena's residual. The velocity is kept twice, so that a step can be undone: the new one is
// written beside the old, past the caches, in the one pass that writes v over the gradient. Without momentum
// both are left out: this is then the residual memory.

#include <memory>

#include "compress/memory/memory.h"

namespace topknot {

template <class T>
class DgcMemory final : public Memory<T> {
 public:
  explicit DgcMemory(const CompressOptions& options);  // momentum, nesterov, momentum_masking

  std::span<const T> addend(std::span<T> gradient, std::span<const T> spare) override;
  void commit(std::span<T> u, std::span<T> spare, std::span<const std::uint32_t> indices,
              std::span<const T> sent, std::span<const std::uint32_t> rejected) override;
  bool keeps() const override { return true; }
  bool owns_momentum() const override { return true; }
  void save(StateWriter& writer) const override;
  // Throws Error for a velocity of another length, at the latest in the next step.
  void load(StateReader& reader) override;

  // Of the last committed step; empty before the first and without momentum.
  std::span<const T> velocity() const { return {velocity_.get(), size_}; }

 private:
  struct Free {
    void operator()(T* p) const;
  };
  using Buffer = std::unique_ptr<T[], Free>;  // aligned for stores past the caches
  static Buffer allocate(std::size_t size);

  T momentum_;
  bool nesterov_, masking_;
  std::size_t size_ = 0;
  Buffer velocity_, next_;  // as committed, and of the step that is under way
};

}  // namespace topknot
