// RegTop-k on the GPU: the CPU's, entry by entry, over steps that are committed, refused, saved and loaded. Over the
// stand-in tanh is the CPU's; a GPU's may differ in the last bit of a double, which these data do not show.
#include <limits>

#include "nn/base/check.h"
#include "tests/cuda/selectors.h"

namespace topknot {
namespace {

using namespace testing;

CompressOptions options_of(double mu = 4, const std::string& variant = "A", double q = 1e8) {
  CompressOptions options;
  options.set("mu", mu);
  options.set("variant", variant);
  options.set("q", q);
  return options;
}

Asked at(double density, std::int64_t step = 0) {
  Asked asked;
  asked.density = density;
  asked.step = step;
  return asked;
}

// A gradient that moves slowly, so that the carried bound holds now and then.
std::vector<float> drifting(std::size_t n, std::uint32_t step, std::uint32_t jump_at = 1000) {
  std::vector<float> x = noise(n, 1, 2);
  const std::vector<float> change = noise(n, 100 + step);
  for (std::size_t i = 0; i < n; ++i) x[i] += 0.2f * change[i];
  if (step == jump_at)
    for (float& value : x) value *= 0.05f;
  return x;
}

}  // namespace

TEST_CASE("RegTop-k on the GPU lists what a common factor below 1 lets rise above the bound") {
  const OnGpu gpu;
  const CompressOptions options = options_of(1, "A", 0.3);  // tanh(1.3) is 0.86
  BothSelectors both("regtopk", options, 200, 0, 0.01);
  std::vector<float> u(200, 0.01f), average(200);
  u[3] = 1, u[50] = 0.9f;
  both.select(gpu.stream(), u, {}, at(0.01));
  REQUIRE(both.expected.indices == std::vector<std::uint32_t>{3, 50});
  average[3] = 50, average[50] = 0.9f;  // entry 3 survived many times over, entry 50 just so
  both.set_outcome(false, both.expected.values, average, 1, 1);
  both.put_commit(gpu.stream(), 1);
  both.commit_cpu(false);
  u[3] = 0.88f;  // below the bound of 0.98 * 0.9; its score is 1.02
  u[50] = 0.95f, u[60] = 0.93f, u[70] = 0.9f;
  both.select(gpu.stream(), u, {}, at(0.01));
  CHECK(both.expected.indices == std::vector<std::uint32_t>{3, 60});
}

TEST_CASE("RegTop-k on the GPU keeps its last entries where a higher density needs more room") {
  const OnGpu gpu;
  const std::size_t n = 3000;
  BothSelectors both("regtopk", options_of(), n, 0, 0.01);
  std::uint32_t step = 0;
  for (const double density : {0.01, 0.01, 0.1, 0.1}) {
    both.set_density(density);
    both.select(gpu.stream(), drifting(n, step), {}, at(density, step));
    both.commit(gpu.stream(), false, 1, 2, step);
    ++step;
  }
}

TEST_CASE("RegTop-k saved on either device goes on on the other") {
  const OnGpu gpu;
  const std::size_t n = 2000;
  BothSelectors first("regtopk", options_of(1), n, 0, 0.05);
  for (std::uint32_t step = 0; step < 3; ++step) {
    first.select(gpu.stream(), drifting(n, step), {}, at(0.05, step));
    first.commit(gpu.stream(), false, 1, 2, step);
  }
  const std::vector<std::byte> of_gpu = saved(*first.gpu), of_cpu = saved(*first.cpu);
  BothSelectors second("regtopk", options_of(1), n, 0, 0.01);  // room for fewer than were sent
  StateReader to_cpu(of_gpu), to_gpu(of_cpu);
  second.cpu->load(to_cpu);
  second.gpu->load(to_gpu);
  CHECK(saved(*second.gpu) == of_gpu);
  for (std::uint32_t step = 3; step < 6; ++step) {
    second.select(gpu.stream(), drifting(n, step), {}, at(0.01, step));
    second.commit(gpu.stream(), false, 1, 2, step);
  }
}

TEST_CASE("states of RegTop-k that name wrong entries are refused by the GPU") {
  const OnGpu gpu;
  const auto load = [&](const std::vector<std::uint32_t>& indices) {
    StateWriter writer;
    writer.put_list(indices);
    writer.put_list(std::vector<double>(indices.size()));
    writer.put_list(std::vector<double>(indices.size()));
    writer.put(1.0);
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    cuda::make_device_selector("regtopk", options_of(), {{0, 10}})->load(reader);
  };
  load({1, 9});
  CHECK_THROWS_AS(load({9, 1}), Error);
  CHECK_THROWS_AS(load({1, 10}), Error);
  CHECK_THROWS_AS(cuda::make_device_selector("regtopk", options_of(-1), {{0, 10}}), UserError);
}

}  // namespace topknot
