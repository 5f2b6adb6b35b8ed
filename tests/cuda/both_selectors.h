#pragma once
// A selector and its CUDA counterpart, led through the same steps and compared after each.

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/selector.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/device_vector.h"
#include "tests/support/catch.h"

namespace topknot::testing {

struct BothSelectors {
  BothSelectors(const std::string& name, const CompressOptions& options, std::size_t n,
                std::size_t position = 0, double densest = 1)
      : n(n),
        target(selectors().find(name).traits.target),
        position(position),
        capacity(options.capacity),
        cpu(selectors().find(name).make(options)),
        gpu(cuda::make_device_selector(name, options, {{0, n, position, 0}})),
        u(n),
        residual(n),
        average(n),
        parameters(1),
        status(1),
        weight(1) {
    REQUIRE(gpu);
    set_density(densest);
  }

  void set_density(double densest) {
    gpu->set_density({densest});
    memory = cuda::SelectMemory({{0, n, position, 0}}, {densest}, *gpu);
    range = to_host(memory.ranges().range, 1)[0];
    sent = DeviceVector<float>(memory.capacity());
  }

  // What is put on the stream, for graphs.
  void put_selection(cudaStream_t stream, bool with_residual) {
    cuda::Accumulate accumulate;
    accumulate.u = u.data();
    if (with_residual) accumulate.residual = residual.data();
    gpu->select(stream, memory.ranges(), accumulate, parameters.data());
  }
  void put_commit(cudaStream_t stream, int ranks) {
    gpu->commit(stream, memory.ranges(), status.data(), {sent.data(), average.data(), weight.data(), ranks});
  }

  void set_inputs(const std::vector<float>& gradient, const std::vector<float>& addend, const Asked& asked) {
    u.set(gradient);
    if (!addend.empty()) residual.set(addend);
    StepParameters step;
    step.step = asked.step;
    step.rank = asked.rank;
    step.density = asked.density;
    parameters.set({step});
  }

  // The CPU's selection of the same, cut to compress.capacity.
  void expect(std::vector<float> gradient, const std::vector<float>& addend, Asked asked) {
    asked.position = position;
    asked.target = target;
    expected = select_once(*cpu, gradient, addend, asked);
    expected_u = std::move(gradient);
    expected_over = 0;
    if (capacity == 0) return;
    const double room = capacity * static_cast<double>(target(asked.density, n));
    const std::size_t count = expected.indices.size();
    if (static_cast<double>(count) > room) keep_largest(expected, static_cast<std::size_t>(room));
    expected_over = count - expected.indices.size();
  }
  // What is in the GPU's memory is that.
  void check() const {
    const cuda::SelectStats found = to_host(range.stats, 1)[0];
    REQUIRE(found.finite == expected.finite);
    REQUIRE(found.count == expected.indices.size());
    REQUIRE(found.over == expected_over);
    REQUIRE(found.threshold == static_cast<float>(expected.threshold));
    REQUIRE(to_host(range.taken.indices, found.count) == expected.indices);
    REQUIRE(same_bits(to_host(range.taken.values, found.count), expected.values));
    if (expected.finite) REQUIRE(same_bits(u.host(), expected_u));
  }
  void compare(const std::vector<float>& gradient, const std::vector<float>& addend, const Asked& asked) {
    INFO("n " << n << ", density " << asked.density << ", step " << asked.step);
    expect(gradient, addend, asked);
    check();
  }

  void select(cudaStream_t stream, const std::vector<float>& gradient, const std::vector<float>& addend,
              const Asked& asked) {
    set_inputs(gradient, addend, asked);
    put_selection(stream, !addend.empty());
    compare(gradient, addend, asked);
  }

  void set_outcome(bool bad, const std::vector<float>& sent_values, const std::vector<float>& mean,
                   float own_weight, int ranks) {
    cpu_sent = sent_values;
    cpu_average = mean;
    cpu_weight = static_cast<double>(own_weight) / ranks;
    sent.set(cpu_sent);
    average.set(cpu_average);
    weight.set({own_weight});
    StepStatus word;
    word.bad = bad;
    status.set({word});
  }
  // What ranks might make of the selection: values cut to some bits, and an average that strangers changed.
  void set_outcome(bool bad, float own_weight, int ranks, std::uint32_t draw) {
    std::vector<float> cut = expected.values, mean(n);
    for (float& x : cut)
      x = static_cast<float>(static_cast<std::int64_t>(std::clamp(x, -1e9f, 1e9f) * 4096)) / 4096;
    const std::vector<float> others = noise(n, 900 + draw);
    for (std::size_t i = 0; i < cut.size(); ++i) {
      const std::uint32_t at = expected.indices[i];
      mean[at] = cut[i] / static_cast<float>(ranks);
      if (i % 3 == 0) mean[at] += others[at];
      if (i % 7 == 1) mean[at] = 0;  // cancelled
    }
    set_outcome(bad, cut, mean, own_weight, ranks);
  }
  void commit_cpu(bool bad) {
    if (bad) return cpu->discard();
    cpu->commit({{expected.indices, cpu_sent}, cpu_average, cpu_weight});
  }
  void commit(cudaStream_t stream, bool bad, float own_weight, int ranks, std::uint32_t draw) {
    set_outcome(bad, own_weight, ranks, draw);
    put_commit(stream, ranks);
    commit_cpu(bad);
    REQUIRE(saved(*gpu) == saved(*cpu));
  }

  std::size_t n;
  std::size_t (*target)(double density, std::size_t n);
  std::size_t position;
  double capacity;
  std::unique_ptr<Selector> cpu;
  std::unique_ptr<cuda::DeviceSelector> gpu;
  DeviceVector<float> u, residual, average;
  DeviceVector<StepParameters> parameters;
  DeviceVector<StepStatus> status;
  DeviceVector<float> weight;
  DeviceVector<float> sent;
  cuda::SelectMemory memory;
  cuda::SelectRange range;
  Selection expected;
  std::vector<float> expected_u;  // with the addend
  std::size_t expected_over = 0;
  std::vector<float> cpu_sent, cpu_average;
  double cpu_weight = 1;
};

}  // namespace topknot::testing
