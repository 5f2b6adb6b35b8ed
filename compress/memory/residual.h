#pragma once
// Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): u = gradient + residual;
// what is sent leaves u, the rest is the next residual. With exact values, sent + residual == u bit for bit.

#include "compress/memory/memory.h"

namespace topknot {

template <class T>
class ResidualMemory final : public Memory<T> {
 public:
  Addend<T> addend(std::span<T> gradient, std::span<const T> spare) override;
  void commit(std::span<T> u, std::span<T> spare, std::span<const std::uint32_t> indices,
              std::span<const T> sent, std::span<const std::uint32_t> rejected) override;
  bool has_residual() const override { return true; }
};

}  // namespace topknot
