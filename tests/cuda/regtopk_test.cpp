// RegTop-k on the GPU: the CPU's, entry by entry, over steps that are committed, refused, saved and loaded. Over the
// stand-in tanh is the CPU's; a GPU's may differ in the last bit of a double, which these data do not show.
#include <limits>

#include "nn/base/check.h"
#include "tests/cuda/both_selectors.h"
#include "tests/cuda/fixture.h"

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

TEST_CASE("RegTop-k on the GPU is the CPU's over good and bad steps") {
  const OnGpu gpu;
  const CompressOptions options =
      GENERATE(options_of(), options_of(0.5, "B"), options_of(1, "A", 0.3), options_of(20, "B", 1e-3));
  const std::size_t n = GENERATE(1, 2, 40, 6000);
  BothSelectors both("regtopk", options, n, 5, 0.1);
  const std::string pattern = "ggbgggbbgggg";
  for (std::uint32_t step = 0; step < pattern.size(); ++step) {
    const std::vector<float> addend = step % 2 ? drifting(n, 70 + step) : std::vector<float>();
    both.select(gpu.stream(), drifting(n, step, 8), addend, at(0.1, step));
    both.commit(gpu.stream(), pattern[step] == 'b', 1.25f, 3, step);
  }
}

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

TEST_CASE("RegTop-k on the GPU finds its entries where far too many exceed the last bound") {
  const OnGpu gpu;
  const std::size_t n = 9000;
  BothSelectors both("regtopk", options_of(), n, 0, 0.001);
  for (std::uint32_t step = 0; step < 5; ++step) {
    std::vector<float> u = drifting(n, step);
    if (step >= 2)
      for (float& x : u) x *= 1000;
    both.select(gpu.stream(), u, {}, at(0.001, step));
    both.commit(gpu.stream(), false, 1, 2, step);
  }
}

TEST_CASE("RegTop-k on the GPU follows densities that change, and all entries") {
  const OnGpu gpu;
  const std::size_t n = 3000;
  BothSelectors both("regtopk", options_of(), n, 0, 1);
  std::uint32_t step = 0;
  for (const double density : {1.0, 0.25, 1.0, 0.0625, 0.01}) {
    both.set_density(density);
    for (int i = 0; i < 3; ++i, ++step) {
      both.select(gpu.stream(), drifting(n, step), {}, at(density, step));
      both.commit(gpu.stream(), step % 4 == 2, 1, 2, step);
    }
  }
  for (const double density : {0.001, 0.01, 0.0001, 0.01}) {  // less than what memory was made for
    both.select(gpu.stream(), drifting(n, step), {}, at(density, step));
    both.commit(gpu.stream(), false, 1, 2, step);
    ++step;
  }
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

TEST_CASE("ties, zeros and huge values are scored on the GPU as on the CPU") {
  const OnGpu gpu;
  using Limits = std::numeric_limits<float>;
  for (const std::size_t n : {9u, 5000u}) {
    BothSelectors both("regtopk", options_of(2, GENERATE(as<std::string>{}, "A", "B")), n, 0, 0.2);
    std::uint32_t step = 0;
    for (const float value : {0.0f, 1.0f, -1.0f, Limits::denorm_min(), Limits::max()})
      for (int again = 0; again < 2; ++again, ++step) {
        std::vector<float> u(n, value);
        if (again == 1) u[n / 2] = -value / 2;
        both.select(gpu.stream(), u, {}, at(0.2, step));
        both.commit(gpu.stream(), false, 1, 4, step);
      }
  }
}

TEST_CASE("a NaN or an Inf selects nothing of RegTop-k on the GPU and leaves no trace") {
  const OnGpu gpu;
  const std::size_t n = 4500;
  BothSelectors both("regtopk", options_of(), n, 0, 1);
  for (std::uint32_t step = 0; step < 6; ++step) {
    std::vector<float> u = drifting(n, step);
    const bool bad = step % 2 == 1;
    if (bad) u[step == 1 ? 0 : n - step] = static_cast<float>(step == 3 ? HUGE_VAL : std::nan(""));
    both.select(gpu.stream(), u, {}, at(step == 5 ? 1 : 0.01, step));
    CHECK(both.expected.finite == !bad);
    both.commit(gpu.stream(), bad, 1, 2, step);
  }
}

TEST_CASE("captured selections and commits of RegTop-k, replayed, are the CPU's") {
  const OnGpu gpu;
  const std::size_t n = 5000;
  BothSelectors both("regtopk", options_of(1), n, 0, 0.05);
  CapturedGraph selection(gpu.stream(), [&] { both.put_selection(gpu.stream(), true); });
  CapturedGraph commit(gpu.stream(), [&] { both.put_commit(gpu.stream(), 2); });
  for (std::uint32_t step = 0; step < 9; ++step) {
    const std::vector<float> u = drifting(n, step, 6), addend = drifting(n, 300 + step);
    const Asked asked = at(step < 4 ? 0.05 : 0.01, step);
    both.set_inputs(u, addend, asked);
    selection.launch(gpu.stream());
    both.compare(u, addend, asked);
    const bool bad = step == 3;
    both.set_outcome(bad, 0.75f, 2, step);
    commit.launch(gpu.stream());
    both.commit_cpu(bad);
    REQUIRE(saved(*both.gpu) == saved(*both.cpu));
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
