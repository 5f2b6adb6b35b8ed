#pragma once
// The cost of passes, counted while they run: operations as the ops report them, and the memory of tensors.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "nn/base/check.h"

namespace topknot {

// Counts what the calling thread does while it exists; one at a time per thread.
class PassCost {
 public:
  PassCost() {
    TOPKNOT_CHECK(!counting_, "one PassCost at a time per thread");
    counting_ = this;
  }
  ~PassCost() { counting_ = nullptr; }
  PassCost(const PassCost&) = delete;

  // Operations of convolutions and matrix products alone, 2 per multiply-add, for any algorithm.
  double flops() const { return flops_; }
  // The most bytes of tensors of this thread that were there at once, beyond those at the start.
  std::int64_t peak_bytes() const { return peak_; }

  // From ops: in their forward function, and in their backward function for each gradient that they compute.
  static void add_flops(double flops) {
    if (counting_) counting_->flops_ += flops;
  }
  // From tensors: where memory is allocated, and, with what that returned, where it is released: memory of
  // other threads, and of before, is not counted when it goes.
  static std::uint64_t allocated(std::int64_t bytes) {
    if (!counting_) return 0;
    counting_->bytes_ += bytes;
    counting_->peak_ = std::max(counting_->peak_, counting_->bytes_);
    return counting_->number_;
  }
  static void released(std::int64_t bytes, std::uint64_t counter) {
    if (counting_ && counting_->number_ == counter) counting_->bytes_ -= bytes;
  }

 private:
  static inline thread_local PassCost* counting_ = nullptr;
  static inline std::atomic<std::uint64_t> last_ = 0;
  const std::uint64_t number_ = ++last_;  // of all that there were; from 1
  double flops_ = 0;
  std::int64_t bytes_ = 0, peak_ = 0;
};

}  // namespace topknot
