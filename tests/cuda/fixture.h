#pragma once
// A rank's context on the first GPU, current in this thread. On a machine without a GPU the CUDA emulator has
// one.

#include "nn/core/cuda/context.h"
#include "tests/support/test.h"

namespace topknot {

// The orders in which blocks and threads run while what such a function returns lives: the device's own, and
// those that tests/emulator/tests/order_test.cpp adds. GENERATE(from_range(orders()))() in a test runs it in each.
using Order = std::shared_ptr<void> (*)();
inline std::vector<Order>& orders() {
  static std::vector<Order> all{[] { return std::shared_ptr<void>(); }};
  return all;
}

class OnGpu {
 public:
  explicit OnGpu(cuda::Precision precision = cuda::Precision::fp32, bool deterministic = true,
                 bool shared = false, const std::string& algorithm_cache = "")
      : context_({0, 0, precision, deterministic, shared, algorithm_cache}), use_(context_) {}
  explicit OnGpu(const cuda::ContextOptions& options) : context_(options), use_(context_) {}
  cuda::Context& context() { return context_; }
  Device device() const { return context_.device(); }
  cudaStream_t stream() const { return context_.stream(); }
  std::shared_ptr<cuda::Pool> pool() const { return context_.pool(); }

 private:
  cuda::Context context_;
  cuda::Context::Use use_;
};

}  // namespace topknot
