// gaussiank on a GPU goes through the CPU's levels, from the same moments to the last bit.
#include "compress/select/selector.h"

#include "compress/parallel.h"
#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/pass_kernels.h"
#include "compress/select/passes/passes.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

static_assert(gaussiank::kMomentsChunk == kChunk, "sums are made by the CPU's chunks");

// The level (compress/select/gaussiank_rule.h) at which the last select() by the rule ended.
int last_level(const Selector& selector) {
  const auto trace = selector.diagnostics().trace;
  if (trace.empty()) return 0;
  const gaussiank::Thresholds t = gaussiank::thresholds_from(trace.front().threshold);
  return int(std::find(t.level, t.level + gaussiank::kLevels, trace.back().threshold) - t.level);
}

TEST_CASE("topk and gaussiank on a GPU through a long vector, a warm-up of densities and refused steps") {
  const OnGpu gpu;
  const std::size_t n = 70000;
  for (const std::string name : {"topk", "gaussiank"}) {
    INFO(name);
    SelectPair pair(name, {}, n);
    std::uint32_t t = 0;
    std::set<int> levels;
    for (const double density : {0.25, 0.05, 0.01, 0.001}) {
      pair.set_density(density);
      if (name == "topk") CHECK(pair.capacity() == target_count(density, n));
      for (int i = 0; i < 3; ++i, ++t) {
        pair.step(gradient_of_kind(0, n, t), density, i != 1);
        if (name == "gaussiank") levels.insert(last_level(*pair.both().cpu));
      }
    }
    if (name == "gaussiank") CHECK(levels.size() > 1);  // the rule moves over its levels
    pair.step(gradient_of_kind(7, n, t++), 0.001);
    pair.step(gradient_of_kind(1, n, t++), 0.001);
  }
}

TEST_CASE("gaussiank on a GPU has room for what compress.capacity lets through") {
  const OnGpu gpu;
  for (const double capacity : {0.0, 1.0, 1.5, 4.0}) {
    CompressOptions options;
    options.capacity = capacity;
    SelectPair pair("gaussiank", options, 9000);
    pair.set_density(0.01);
    CHECK(pair.capacity() == (capacity == 0 ? 9000 : std::size_t(90 * capacity)));
  }
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

TEST_CASE("gaussiank on a GPU gives the golden traces, also by a selector that was told of another density") {
  const OnGpu gpu;
  // The golden traces: float64, so that float counts may be off by two.
  struct Golden {
    const char* fixture;
    double density, threshold;
    std::vector<std::pair<int, double>> evaluations;  // level, count
  };
  for (const Golden& golden : {Golden{"cubic", 0.01, 0.973520717, {{0, 89}}},
                               {"cubic", 0.001, 0.932748346, {{0, 0}, {1, 1465}, {4, 229}}},
                               {"p9", 0.01, 0.886298473, {{0, 569}, {2, 133}}}}) {
    INFO(golden.fixture << " at " << golden.density);
    const std::vector<float> x = fixture(golden.fixture);
    const DeviceVector<float> u(x);
    const DeviceVector<StepParameters> parameters(std::vector<StepParameters>{{.density = golden.density}});
    cuda::Accumulate a;
    a.u = u.data();
    WatchedSelection selection(x.size(), 1.0);
    selection.select(gpu.stream(), parameters.data(), a);
    const cuda::DeviceDiagnostics now = selection.now();
    for (const auto& [level, count] : golden.evaluations) CHECK(std::abs(now.counts[level] - count) <= 2);
    // Without a quantile from the host the kernel's own does, to a few bits.
    CHECK(now.thresholds[golden.evaluations.back().first] == Approx(golden.threshold).epsilon(1e-6));
  }
}

TEST_CASE("the level that gaussiank carries on a GPU is the CPU's last one; a refused step leaves it") {
  const OnGpu gpu;
  const std::size_t n = 9000;
  BothSelectors both("gaussiank", {}, n, 0, 0.01);
  std::set<int> carried;
  int level = 0;
  for (std::uint32_t t = 0; t < 8; ++t) {
    // By turns a rule that ends at its first threshold and one that goes on; every third step is refused.
    std::vector<float> u = t % 2 ? noise(n, t) : noise(n, t, 5);
    if (t == 6) std::fill(u.begin(), u.end(), 0.5f);  // exact
    const bool bad = t % 3 == 2;
    both.select(gpu.stream(), u, {}, {});
    both.commit(gpu.stream(), bad, 1, 1, t);
    if (!bad && !both.cpu->diagnostics().trace.empty()) level = last_level(*both.cpu);
    carried.insert(both.gpu->diagnostics(0).level);
    CHECK(both.gpu->diagnostics(0).level == level);
  }
  CHECK(carried.size() > 1);
}

TEST_CASE("moments on a GPU are the CPU's bits: whole chunks, parts of one, vectors off their alignment") {
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
      const DeviceVector<StepParameters> parameters(std::vector<StepParameters>{{.density = 0.01}});
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
