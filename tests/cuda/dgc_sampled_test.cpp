// DGC's sampled selection on the GPU where its threshold changes often, and behind momentum.
#include <limits>

#include "compress/select/dgc_rule.h"
#include "nn/base/check.h"
#include "tests/cuda/selectors.h"

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

TEST_CASE("the sampled selection validates its options on a GPU too") {
  const OnGpu gpu;
  CompressOptions options;
  options.set("truncate", "middle");
  CHECK_THROWS_AS(cuda::make_device_selector("dgc_sampled", options, {{0, 10}}), UserError);
}

}  // namespace topknot
