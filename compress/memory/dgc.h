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
// momentum (but the factor 1 + m of Nesterov's form), and without it the average is torch.optim.SGD's direction
// bit for bit on one rank. What a value codec loses stays in v; the velocity is zeroed all the same. Entries that
// the collective rejected keep both.
//
// v lives in the arena's residual. The velocity is kept twice, so that a step can be undone: the new one is
// written beside the old, past the caches, in the one pass that writes v over the gradient. Without momentum
// both are left out: this is then the residual memory.
//
// Preset dgc:
// Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887), whole. Its parts, and the
// key that turns each of them off or changes it:
//
//   momentum correction      compress.memory: dgc (compress/memory/dgc.h); residual leaves momentum to the
//                            optimizer, after the average
//   Nesterov's form          optimizer.nesterov (the authors' code; with nothing masked it is torch's)
//   momentum factor masking  compress.momentum_masking
//   local gradient clipping  compress.clip: thr_G. The paper clips gradients that are divided by N already at
//                            N^-1/2 thr_G; here gradients are means of a rank and the average divides, so
//                            each rank's is clipped at sqrt(N) thr_G, over all its parameters as in the paper
//                            (the code's helpers work tensor by tensor, and are off) (train/step.cpp)
//   sampled selection        compress.select: dgc_sampled (compress/select/dgc_sampled.cpp), with
//                            compress.sample_ratio, .resample, .truncate; compress.scope: tensor selects in each
//                            tensor, as paper and code do
//   warm-up of the density   compress.warmup lists it, [0.25, 0.0625, 0.015625, 0.004] as in the paper; or
//                            compress.warmup_epochs E: density^((e + 1) / (E + 1)), as in the code. In epochs
//                            of density 1 the code does not compress; we send everything, and masking takes
//                            the momentum off
//   1-D tensors dense        compress.dense_1d (the code): plain all-reduce, with the optimizer's momentum
//   weight decay             optimizer.weight_decay: outside, with a momentum of its own, never compressed
//                            (the code; optim/sgd.cpp, GradientForm::has_momentum)
//   32-bit values, 16-bit    compress.codec and compress.values (the paper; the code sends 64-bit positions)
//   runs of zeros
//
// The code selects |v| >= t, the paper |v| > t; we follow the code.

#include <memory>

#include "compress/memory/memory.h"

namespace topknot {

// compress.momentum_masking.
bool momentum_masking(const CompressOptions& options);

class DgcMemory final : public Memory {
 public:
  explicit DgcMemory(const CompressOptions& options);  // momentum, nesterov, momentum_masking

  FeedbackInput input(std::span<float> gradient, std::span<const float> spare) override;
  void commit(std::span<float> u, std::span<float> spare, std::span<const std::uint32_t> indices,
              std::span<const float> sent, std::span<const std::uint32_t> rejected) override;
  bool has_residual() const override { return true; }
  void save(StateWriter& writer) const override;
  // Throws Error for a velocity of another length, at the latest in the next step.
  void load(StateReader& reader) override;

  // Of the last committed step; empty before the first and without momentum.
  std::span<const float> velocity() const { return {velocity_.get(), size_}; }

 private:
  struct Free {
    void operator()(float* p) const;
  };
  using Buffer = std::unique_ptr<float[], Free>;  // aligned for stores past the caches
  static Buffer allocate(std::size_t size);

  float momentum_;
  bool nesterov_, masking_;
  std::size_t size_ = 0;
  Buffer velocity_, next_;  // as committed, and of the step that is under way
};

}  // namespace topknot
