#pragma once
// What forward and backward passes cost, counted while they run: floating-point operations as the ops report them, and
// the memory of tensors.

#include <cstdint>

namespace topknot {

// Counts what the calling thread does while it exists; one at a time per thread.
class PassCost {
 public:
  PassCost();
  ~PassCost();
  PassCost(const PassCost&) = delete;

  // Of convolutions and matrix products, 2 per multiply-add, whatever the algorithm; other ops are not counted.
  double flops() const { return flops_; }
  // The most bytes of tensors of this thread that were there at once, beyond those at the start.
  std::int64_t peak_bytes() const { return peak_; }

  // From ops: in their forward function, and in their backward function for each gradient that they compute.
  static void add_flops(double flops);
  // From tensors: where memory is allocated, and, with what that returned, where it is released: memory of other threads, and of
  // before, is not counted when it goes.
  static std::uint64_t allocated(std::int64_t bytes);
  static void released(std::int64_t bytes, std::uint64_t counter);

 private:
  const std::uint64_t number_;  // of all that there were; from 1
  double flops_ = 0;
  std::int64_t bytes_ = 0, peak_ = 0;
};

}  // namespace topknot
