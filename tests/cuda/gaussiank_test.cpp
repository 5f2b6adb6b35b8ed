// gaussiank on a GPU goes through the CPU's levels, from the same moments to the last bit.
#include "compress/select/selector.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "compress/parallel.h"
#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/pass_kernels.h"
#include "compress/select/passes/passes.h"
#include "nn/core/rng.h"
#include "tests/compress/fixtures.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

static_assert(gaussiank::kMomentsChunk == kChunk, "sums are made by the CPU's chunks");

// The level (compress/select/gaussiank_rule.h) at which the last select() by the rule ended.
int last_level(const Selector& selector) {
  const auto trace = selector.diagnostics().trace;
  if (trace.empty()) return 0;
  const gaussiank::Thresholds t = gaussiank::thresholds_from(trace.front().threshold);
  return static_cast<int>(std::find(t.level, t.level + gaussiank::kLevels, trace.back().threshold) - t.level);
}

TEST_CASE(
    "gaussiank on a GPU through a long vector and a warm-up of densities: the rule moves over its levels") {
  const OnGpu gpu;
  const std::size_t n = 70000;
  SelectPair pair("gaussiank", {}, n);
  std::uint32_t t = 0;
  std::vector<int> levels;
  for (const double density : {0.25, 0.01, 0.001}) {
    pair.set_density(density);
    for (int i = 0; i < 3; ++i, ++t) {
      pair.step(gradient_of(0, n, t), density, i != 1);
      levels.push_back(last_level(pair.cpu()));
    }
  }
  std::sort(levels.begin(), levels.end());
  CHECK(std::unique(levels.begin(), levels.end()) - levels.begin() > 1);
  pair.step(gradient_of(7, n, t++), 0.001);
  pair.step(gradient_of(1, n, t++), 0.001);
}

TEST_CASE("gaussiank sends all where the mean is far from zero") {
  const OnGpu gpu;
  const std::size_t n = 5000;
  std::vector<float> x(n);
  const CounterRng rng(19, RngUse::test);
  for (std::size_t i = 0; i < n; ++i) x[i] = -5.0f + 0.1f * rng.normal(i);
  SelectPair pair("gaussiank", {}, n);
  pair.set_density(0.01);
  CHECK(pair.step(x, 0.01).indices.size() == n);
}

// A selection that tells what it found out.
struct WatchedSelection {
  explicit WatchedSelection(std::size_t n, double density = 0.01)
      : selector(cuda::make_device_selector("gaussiank", {}, {{0, n}})), one(n, density, *selector) {
    selector->set_density({density});
  }
  void select(cudaStream_t stream, const StepParameters* parameters, const cuda::Accumulate& a) {
    selector->select(stream, one.ranges(), a, parameters);
  }
  cuda::DeviceDiagnostics now() const { return selector->diagnostics(0); }

  std::unique_ptr<cuda::DeviceSelector> selector;
  OneRange one;
};

// The golden traces: float64, so that float counts may be off by two.
struct Golden {
  const char* fixture;
  double density, threshold, count;
  std::vector<std::pair<int, double>> evaluations;  // level, count
};

TEST_CASE("gaussiank on a GPU gives the golden traces") {
  const OnGpu gpu;
  const Golden goldens[] = {
      {"cubic", 0.01, 0.973520717, 89, {{0, 89}}},
      {"cubic", 0.001, 0.932748346, 229, {{0, 0}, {1, 1465}, {4, 229}}},
      {"p9", 0.01, 0.886298473, 133, {{0, 569}, {2, 133}}},
  };
  for (const Golden& golden : goldens) {
    INFO(golden.fixture << " at " << golden.density);
    const std::vector<float> x = fixture(golden.fixture);
    const DeviceVector<float> u(x);
    DeviceVector<StepParameters> parameters(1);
    StepParameters step;
    step.density = golden.density;
    parameters.set({step});
    cuda::Accumulate a;
    a.u = u.data();
    BothSelectors both("gaussiank", {}, x.size(), 0, golden.density);
    both.gpu->select(gpu.stream(), both.memory.ranges(), a, parameters.data());
    const cuda::SelectStats found = to_host(both.range.stats, 1)[0];
    CHECK(found.threshold == Approx(golden.threshold).epsilon(1e-6));
    CHECK(std::abs(found.count - golden.count) <= 2);

    // The same evaluations, of a selector that was told of another density.
    WatchedSelection selection(x.size(), 1.0);
    selection.select(gpu.stream(), parameters.data(), a);
    const cuda::DeviceDiagnostics now = selection.now();
    for (const auto& [level, count] : golden.evaluations) CHECK(std::abs(now.counts[level] - count) <= 2);
    // Without a quantile from the host the kernel's own does, to a few bits.
    CHECK(now.thresholds[golden.evaluations.back().first] == Approx(golden.threshold).epsilon(1e-6));
  }
}

TEST_CASE(
    "the level that gaussiank carries on a GPU is the last one on the CPU, and a refused step leaves it") {
  const OnGpu gpu;
  const std::size_t n = 9000;
  const auto cpu = make_selector("gaussiank");
  const DeviceVector<float> u_gpu(n);
  DeviceVector<StepParameters> parameters(1);
  DeviceVector<StepStatus> status(1);
  WatchedSelection selection(n);
  std::vector<int> carried;
  int level = 0;
  for (std::uint32_t t = 0; t < 8; ++t) {
    // By turns a rule that ends at its first threshold and one that goes on; every third step is refused.
    std::vector<float> u = t % 2 ? noise(n, t) : noise(n, t, 5);
    if (t == 6) std::fill(u.begin(), u.end(), 0.5f);  // exact
    StepParameters step;
    step.density = 0.01;
    parameters.set({step});
    StepStatus said;
    said.bad = t % 3 == 2;
    status.set({said});
    to_device(u_gpu.data(), u);
    cuda::Accumulate a;
    a.u = u_gpu.data();
    selection.select(gpu.stream(), parameters.data(), a);
    selection.selector->commit(gpu.stream(), selection.one.ranges(), status.data(), {});
    select_once(*cpu, u, {}, {});
    if (said.bad)
      cpu->discard();
    else
      cpu->commit({});
    carried.push_back(selection.now().level);
    if (!said.bad && !cpu->diagnostics().trace.empty()) level = last_level(*cpu);
    CHECK(carried.back() == level);
  }
  std::sort(carried.begin(), carried.end());
  CHECK(std::unique(carried.begin(), carried.end()) - carried.begin() > 1);
}

TEST_CASE(
    "moments on a GPU are the CPU's bits, for whole chunks, parts of one, and vectors off their alignment") {
  const OnGpu gpu;
  for (const std::size_t n : {2048u, 2063u, 16384u, 16385u, 40007u})
    for (const std::size_t off : {0u, 1u}) {
      INFO(n << " elements, " << off << " off");
      std::vector<float> u = noise(n, 3, 9), addend = noise(n, 4, 9);  // sums that round
      std::vector<float> padded(off, 1e30f);
      padded.insert(padded.end(), u.begin(), u.end());
      const DeviceVector<float> u_gpu(padded), r_gpu(addend);
      const Moments expected = accumulate_with_moments(std::span<float>(u), std::span<const float>(addend));
      cuda::Accumulate a;
      a.u = u_gpu.data() + off, a.residual = r_gpu.data();
      WatchedSelection selection(n);
      DeviceVector<StepParameters> parameters(1);
      StepParameters step;
      step.density = 0.01;
      parameters.set({step});
      const double z = -normal_quantile(0.005);
      selection.select(gpu.stream(), parameters.data(), a);
      const cuda::DeviceDiagnostics now = selection.now();
      CHECK(now.thresholds[0] == expected.mean + z * expected.deviation);
      CHECK(same_bits(to_host(u_gpu.data() + off, n), u));
      const double shift = moments_shift(u[0], u[n / 2], u[n - 1]);
      for (std::size_t c = 0; c < now.moments.size(); ++c) {
        std::uint32_t index[pass::kGroup];
        float value[pass::kGroup];
        pass::Sink sink{index, value, 0};
        const auto chunk =
            pass::moments_chunk(u.data(), nullptr, c * gaussiank::kMomentsChunk,
                                std::min(n, (c + 1) * gaussiank::kMomentsChunk), shift, kLargestFinite, sink);
        CHECK(now.moments[c].first == chunk.sum);
        CHECK(now.moments[c].second == chunk.squares);
      }
    }
}

}  // namespace
}  // namespace topknot::testing
