#pragma once
// Memory: what happens to the part of the gradient that is not sent. One a group and rank.

#include <cstdint>
#include <memory>
#include <span>

#include "compress/compressor.h"
#include "nn/core/registry.h"

namespace topknot {

template <class T>
class Memory {
 public:
  virtual ~Memory() = default;

  // What selection adds to the gradient in its own pass, to make u over the gradient's memory: as long as the
  // gradient, or empty. A memory with statistics of its own (DGC's velocity) updates a copy here and returns
  // nothing to add.
  virtual std::span<const T> addend(std::span<T> gradient, std::span<const T> spare) = 0;

  // Turns u into what the next step starts from. `sent` are the values at `indices` as the other ranks
  // decoded them; the entries at `rejected` (positions, any order) did not count and keep their value.
  virtual void commit(std::span<T> u, std::span<const std::uint32_t> indices, std::span<const T> sent,
                      std::span<const std::uint32_t> rejected) = 0;
  // As before addend().
  virtual void discard() {}

  // Whether u's memory lives on as the residual. The average then goes to the spare memory, else over u.
  virtual bool keeps() const = 0;
  // Whether optimizer.momentum is applied in here; the optimizer then keeps it only for weight decay and
  // dense slices.
  virtual bool owns_momentum() const { return false; }
};

using MemoryFactory = std::unique_ptr<Memory<float>> (*)(const CompressOptions& options);
Registry<MemoryFactory>& memories();

}  // namespace topknot
