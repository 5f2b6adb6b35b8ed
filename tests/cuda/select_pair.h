#pragma once
// A selector and its CUDA counterpart through steps of error feedback, with the selection alone as the
// average.

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "nn/core/rng.h"
#include "tests/cuda/both_selectors.h"
#include "tests/cuda/fixture.h"

namespace topknot::testing {

class SelectPair {
 public:
  // `graph`: steps are captured once and replayed as long as set_density() is not called.
  SelectPair(const std::string& name, const CompressOptions& options, std::size_t n, bool graph = false)
      : both_(name, options, n), residual_(n), graph_(graph) {}

  void set_density(double density) {
    executable_.reset();
    both_.set_density(density);
  }

  // A step of gradient g. `good`: whether the ranks accept it, where it is finite. Returns the CPU's selection.
  Selection step(const std::vector<float>& g, double density, bool good = true) {
    const Asked asked{density, time_++};
    both_.expect(g, residual_, asked);
    good = good && both_.expected.finite;
    both_.set_inputs(g, residual_, asked);
    both_.set_outcome(!good, both_.expected.values, std::vector<float>(both_.n), 1, 1);
    run();
    both_.check();
    both_.commit_cpu(!good);
    if (good) {
      residual_ = both_.expected_u;
      for (const std::uint32_t i : both_.expected.indices) residual_[i] = 0;
    }
    return both_.expected;
  }

  Selector& cpu() { return *both_.cpu; }
  std::size_t capacity() const { return both_.memory.capacity(); }

 private:
  void run() {
    const cudaStream_t stream = cuda::Context::current().stream();
    const auto enqueue = [&] {
      both_.put_selection(stream, true);
      both_.put_commit(stream, 1);
    };
    if (!graph_) return enqueue();
    if (!executable_) executable_ = std::make_unique<CapturedGraph>(stream, enqueue);
    executable_->launch(stream);
  }

  BothSelectors both_;
  std::vector<float> residual_;
  std::int64_t time_ = 0;
  bool graph_;
  std::unique_ptr<CapturedGraph> executable_;
};

// A gradient of the given kind, of a run's life: 0 noise, 1 noise of another size, 2 zeros, 3 a constant, 4 few
// distinct values, 5 denormal numbers, 6 huge ones, 7 all that is large in one place, 8 and 9 with a NaN, an Inf.
inline constexpr int kGradients = 10;
inline std::vector<float> gradient_of(int kind, std::size_t n, std::uint32_t stream) {
  const CounterRng rng(31, RngUse::test, stream);
  std::vector<float> g(n);
  for (std::size_t i = 0; i < n; ++i) {
    g[i] = rng.normal(i) * (i % 3 == 0 ? 1.0f : 0.1f);
    if (kind == 1) g[i] *= 1e-3f;
    if (kind == 2) g[i] = i % 2 ? 0.0f : -0.0f;
    if (kind == 3) g[i] = 0.25f;
    if (kind == 4) g[i] = static_cast<float>(rng.below(i, 3)) - 1;
    if (kind == 5) g[i] *= 1e-42f;
    if (kind == 6) g[i] *= 1e37f;
    if (kind == 7 && i / 1500 == 1) g[i] *= 1e6f;
  }
  if (kind == 8) g[n / 2] = std::numeric_limits<float>::quiet_NaN();
  if (kind == 9) g[n - 1] = -std::numeric_limits<float>::infinity();
  return g;
}

}  // namespace topknot::testing
