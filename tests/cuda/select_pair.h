#pragma once
// A selector of the CPU and the GPU's beside it, through the same steps of error feedback: what they select, and what
// they make of u, must be the same, bit for bit.

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "compress/select/device_selector.h"
#include "compress/select/selector.h"
#include "nn/core/rng.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot::test {

class SelectPair {
 public:
  // `graph`: steps are captured once and replayed as long as set_density() is not called.
  SelectPair(const std::string& name, const CompressOptions& options, std::size_t n, bool graph = false)
      : n_(n),
        options_(options),
        cpu_(selectors().find(name).make<float>(options)),
        gpu_(cuda::make_device_selector(name, options, n, 0)),
        residual_(n),
        u_gpu_(n),
        residual_gpu_(n),
        words_(1),
        verdict_(1),
        facts_(1),
        weight_(std::vector<float>{1.0f}),
        graph_(graph) {}

  void set_density(double density) {
    executable_.reset();
    gpu_->set_density(density);
    capacity_ = gpu_->capacity(density);
    indices_ = DeviceVector<std::uint32_t>(capacity_);
    values_ = DeviceVector<float>(capacity_);
    average_ = DeviceVector<float>(std::vector<float>(n_));
  }

  // A step of gradient g. `good`: whether the ranks accept it, where it is finite. Returns the CPU's selection.
  Selected<float> step(const std::vector<float>& g, double density, bool good = true) {
    std::vector<float> u = g;
    Selected<float> expected;
    SelectStep step;
    step.density = density;
    step.k = cpu_->target(density, n_);
    step.step = time_;
    cpu_->select(u, residual_, step, expected);
    const std::size_t count = expected.indices.size();
    if (const double most = options_.capacity * static_cast<double>(step.k);
        options_.capacity != 0 && static_cast<double>(count) > most)
      keep_largest(expected, static_cast<std::size_t>(most));
    good = good && expected.finite;

    u_gpu_.set(g);
    residual_gpu_.set(residual_);
    cuda::StepWords words;
    words.step = time_++;
    words.density = density;
    words_.set({words});
    cuda::Verdict verdict;
    verdict.bad = !good;
    verdict_.set({verdict});
    run();
    const auto facts = facts_.host()[0];
    REQUIRE(facts.count == expected.indices.size());
    CHECK(facts.finite == expected.finite);
    CHECK(facts.over == count - expected.indices.size());
    CHECK(facts.threshold == static_cast<float>(expected.threshold));
    REQUIRE(to_host(indices_.data(), facts.count) == expected.indices);
    REQUIRE(same_bits(to_host(values_.data(), facts.count), expected.values));
    if (expected.finite) REQUIRE(same_bits(u_gpu_.host(), u));

    if (good) {
      const std::vector<float> average(n_);
      cpu_->commit({expected.indices, expected.values, average, 1.0});
      residual_ = u;
      for (const std::uint32_t i : expected.indices) residual_[i] = 0;
    } else {
      cpu_->discard();
    }
    return expected;
  }

  Selector<float>& cpu() { return *cpu_; }
  std::size_t capacity() const { return capacity_; }

 private:
  void run() {
    if (!graph_) return enqueue();
    const cudaStream_t stream = cuda::Context::current().stream();
    if (!executable_) executable_ = std::make_unique<CapturedGraph>(stream, [&] { enqueue(); });
    executable_->launch(stream);
  }
  void enqueue() {
    const cudaStream_t stream = cuda::Context::current().stream();
    cuda::Accumulate accumulate;
    accumulate.u = u_gpu_.data();
    accumulate.residual = residual_gpu_.data();
    const cuda::DeviceSelected selected = {indices_.data(), values_.data(),
                                           static_cast<std::uint32_t>(capacity_), facts_.data()};
    gpu_->select(stream, accumulate, words_.data(), selected);
    gpu_->commit(stream, verdict_.data(), selected, values_.data(), average_.data(), weight_.data(), 1);
  }

  std::size_t n_;
  CompressOptions options_;
  std::unique_ptr<Selector<float>> cpu_;
  std::unique_ptr<cuda::DeviceSelector> gpu_;
  std::vector<float> residual_;
  DeviceVector<float> u_gpu_, residual_gpu_, values_, average_;
  DeviceVector<std::uint32_t> indices_;
  DeviceVector<cuda::StepWords> words_;
  DeviceVector<cuda::Verdict> verdict_;
  DeviceVector<cuda::DeviceSelected::Facts> facts_;
  DeviceVector<float> weight_;
  std::size_t capacity_ = 0;
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

}  // namespace topknot::test
