// DGC's sampled selection on the GPU: the CPU's, entry by entry.
#include <limits>

#include "compress/select/dgc_rule.h"
#include "nn/base/check.h"
#include "tests/cuda/both_selectors.h"
#include "tests/cuda/fixture.h"

namespace topknot {
namespace {

using namespace testing;

CompressOptions options_of(bool resample, const std::string& truncate, double ratio = 0.01) {
  CompressOptions options;
  options.set("resample", resample);
  options.set("truncate", truncate);
  options.set("sample_ratio", ratio);
  options.seed = 0x123456789abcull;
  return options;
}

}  // namespace

TEST_CASE("the GPU's sampled selection is the CPU's, for all options, densities and tails") {
  const OnGpu gpu;
  const CompressOptions options =
      options_of(GENERATE(true, false), GENERATE(as<std::string>{}, "lowest", "largest"));
  std::size_t fewer = 0, full = 0;
  for (const std::size_t n : {10007u, 3000u, 300u}) {
    BothSelectors both("dgc_sampled", options, n, 7 * n + 3, 0.2);
    for (std::uint32_t draw = 0; draw < 6; ++draw)
      for (const double density : {0.2, 0.01, 0.001}) {
        // Far too many, or far too few, exceed what the sample of a heavy tail says.
        const std::vector<float> u = noise(n, draw, draw % 2 ? 9 : 1);
        const std::vector<float> addend = draw % 3 ? noise(n, draw + 50) : std::vector<float>();
        Asked asked;
        asked.density = density;
        asked.step = draw + 100;
        asked.rank = static_cast<int>(draw % 4);
        both.select(gpu.stream(), u, addend, asked);
        (both.expected.indices.size() < dgc::selected_count(density, n) ? fewer : full) += 1;
      }
  }
  CHECK(full > 10);  // the cases cover both ends
  CHECK(fewer > 5);
}

TEST_CASE("a sample of everything, and the smallest vectors, are selected from as on the CPU") {
  const OnGpu gpu;
  const CompressOptions options = options_of(
      GENERATE(true, false), GENERATE(as<std::string>{}, "lowest", "largest"), GENERATE(0.01, 1.0));
  for (const std::size_t n : {1u, 2u, 3u, 31u, 257u, 5000u}) {
    BothSelectors both("dgc_sampled", options, n);
    for (const double density : {1.0, 0.5, 0.1, 0.001}) {
      Asked asked;
      asked.density = density;
      both.select(gpu.stream(), noise(n, 7), {}, asked);
      // Ties: of values that tie, and of all.
      std::vector<float> tied = noise(n, 8);
      for (float& x : tied) x = static_cast<float>(static_cast<int>(x * 2)) / 2;
      both.select(gpu.stream(), tied, {}, asked);
    }
  }
}

TEST_CASE("zeros, equal values, denormals and huge values end on the GPU as on the CPU") {
  const OnGpu gpu;
  using Limits = std::numeric_limits<float>;
  const CompressOptions options =
      options_of(GENERATE(true, false), GENERATE(as<std::string>{}, "lowest", "largest"));
  for (const std::size_t n : {7u, 5000u, 15000u}) {
    BothSelectors both("dgc_sampled", options, n, 0, 0.01);
    for (const float value : {0.0f, -1.0f, Limits::denorm_min(), 3 * Limits::denorm_min(), Limits::max()})
      both.select(gpu.stream(), std::vector<float>(n, value), {}, {});
    std::vector<float> few(n, 0);
    few[n / 2] = few[n - 1] = -1e-20f;
    both.select(gpu.stream(), few, {}, {});
  }
}

TEST_CASE("after ten changes of the threshold the GPU, too, sends the first k") {
  const OnGpu gpu;
  const double density = 0.001;
  const std::size_t n = 18432, k = 19;
  const SampleGeometry geometry = dgc::geometry_of(n, density, 0.01);
  const CompressOptions options = options_of(GENERATE(true, false), "lowest");
  // The sample sees only ones; 0.8^10 < 0.12 < 0.8^9, and twice as many of those as may be sent. Then a sample
  // of little, so that the threshold rises and falls again.
  const CounterRng rng(options.seed, RngUse::compress, 0, 0);
  const std::size_t start = rng.below(0, static_cast<std::uint32_t>(geometry.stride));
  std::vector<float> u(n, 0);
  for (std::size_t i = 0; i < 2 * k; ++i)
    u[start + i * geometry.stride + 1] = 0.12f + 0.0001f * static_cast<float>(i);
  for (std::size_t i = 0; i < geometry.top_samples; ++i)
    u[start + (n / geometry.stride - 1 - i) * geometry.stride] = 1;
  BothSelectors both("dgc_sampled", options, n, 0, density);
  Asked asked;
  asked.density = density;
  both.select(gpu.stream(), u, {}, asked);
  CHECK(both.expected.indices.size() == k);
  CHECK(both.expected.threshold < 0.12);
  for (std::size_t i = 0; i < geometry.top_samples; ++i)
    u[start + (n / geometry.stride - 1 - i) * geometry.stride] = 0.0900f;
  both.select(gpu.stream(), u, {}, asked);
  for (std::size_t i = 0; i < n; i += 2)
    if (u[i] == 0) u[i] = 0.05f;
  both.select(gpu.stream(), u, {}, asked);
  u.assign(n, 0.5f);
  for (std::size_t i = 0; i < n; i += 3) u[i] = 0.52f;
  both.select(gpu.stream(), u, {}, asked);
}

TEST_CASE("a NaN or an Inf anywhere selects nothing on the GPU, and the next step is as if it had not been") {
  const OnGpu gpu;
  const std::size_t n = GENERATE(1, 50, 9000);
  BothSelectors both("dgc_sampled", options_of(true, "lowest"), n);
  for (const double density : {0.01, 1.0})
    for (const double bad : {std::nan(""), -std::nan(""), HUGE_VAL, -HUGE_VAL})
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        std::vector<float> u = noise(n, 4);
        u[at] = static_cast<float>(bad);
        Asked asked;
        asked.density = density;
        both.select(gpu.stream(), u, {}, asked);
        CHECK_FALSE(both.expected.finite);
        both.select(gpu.stream(), noise(n, 5), {}, asked);
      }
  const std::vector<float> huge(n, std::numeric_limits<float>::max());
  both.select(gpu.stream(), huge, huge, {});  // finite in both, not in the sum
  CHECK_FALSE(both.expected.finite);
}

TEST_CASE("the sample sees what momentum makes of the gradient") {
  const OnGpu gpu;
  const std::size_t n = 20000;
  const bool nesterov = GENERATE(false, true);
  BothSelectors both("dgc_sampled", options_of(true, "lowest"), n, 0, 0.001);
  const std::vector<float> g = noise(n, 1), r = noise(n, 2), v = noise(n, 3, 3);
  std::vector<float> u(n), next(n);
  for (std::size_t i = 0; i < n; ++i) {
    next[i] = nesterov ? 0.9f * (v[i] + g[i]) : 0.9f * v[i] + g[i];
    u[i] = r[i] + (nesterov ? next[i] + g[i] : next[i]);
  }
  DeviceVector<float> velocity(v), next_velocity(n);
  Asked asked;
  asked.density = 0.001;
  both.set_inputs(g, r, asked);
  cuda::Accumulate accumulate;
  accumulate.u = both.u.data();
  accumulate.residual = both.residual.data();
  accumulate.velocity = velocity.data();
  accumulate.next_velocity = next_velocity.data();
  accumulate.momentum = 0.9f;
  accumulate.nesterov = nesterov;
  both.gpu->select(gpu.stream(), both.memory.ranges(), accumulate, both.parameters.data());
  both.compare(u, {}, asked);
  CHECK(same_bits(next_velocity.host(), next));
  CHECK(same_bits(velocity.host(), v));
}

TEST_CASE("the GPU, too, keeps the sampled threshold where just k entries reach it") {
  const OnGpu gpu;
  // 50 entries of 2 at every 9th position: whoever samples these falls from 2 to 1.6, which 100 reach.
  std::vector<float> u(10000, 0.1f);
  for (std::size_t i = 0; i < 50; ++i) u[9 * i] = 2.0f, u[9000 + i] = 1.7f;
  BothSelectors both("dgc_sampled", options_of(true, "largest", 0.1), u.size(), 0, 0.01);
  int met = 0;
  for (std::int64_t step = 0; step < 60; ++step) {
    Asked asked;
    asked.step = step;
    both.select(gpu.stream(), u, {}, asked);
    met += both.expected.threshold == static_cast<double>(2.0f * 0.8f);
  }
  CHECK(met > 0);
}

TEST_CASE("a captured sampled selection, replayed with other parameters and data, is the CPU's") {
  const OnGpu gpu;
  const std::size_t n = 12000;
  BothSelectors both("dgc_sampled", options_of(GENERATE(true, false), "largest"), n, 11, 0.1);
  CapturedGraph graph(gpu.stream(), [&] { both.put_selection(gpu.stream(), true); });
  for (std::uint32_t step = 0; step < 8; ++step) {
    const std::vector<float> u = noise(n, step, step % 3 ? 9 : 1), addend = noise(n, 90 + step);
    Asked asked;
    asked.step = step;
    asked.density = step < 3 ? 0.1 : step < 5 ? 0.01 : 0.0001;
    both.set_inputs(u, addend, asked);
    graph.launch(gpu.stream());
    both.compare(u, addend, asked);
  }
}

TEST_CASE("the sampled selection validates its options on a GPU too") {
  const OnGpu gpu;
  CompressOptions options;
  options.set("truncate", "middle");
  CHECK_THROWS_AS(cuda::make_device_selector("dgc_sampled", options, {{0, 10}}), UserError);
}

}  // namespace topknot
