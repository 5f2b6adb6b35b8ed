#pragma once
// Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): u = gradient + residual;
// what is sent leaves u, the rest is the next residual. With exact values, sent + residual == u bit for bit.

#include "compress/memory/memory.h"

namespace topknot {

class ResidualMemory final : public Memory {
 public:
  FeedbackInput input(std::span<float> gradient, std::span<const float> spare) override;
  void commit(std::span<float> u, std::span<float> spare, std::span<const std::uint32_t> indices,
              std::span<const float> sent, std::span<const std::uint32_t> rejected) override;
  bool has_residual() const override { return true; }
};

}  // namespace topknot
