// What topk on a GPU carries from step to step, and its golden selection.
#include <cmath>
#include <limits>

#include "compress/select/selector.h"
#include "nn/core/rng.h"
#include "tests/compress/fixtures.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

TEST_CASE("topk on a GPU through a long vector, a warm-up of densities and a refused step") {
  const OnGpu gpu;
  const std::size_t n = 70000;
  SelectPair pair("topk", {}, n);
  std::uint32_t t = 0;
  for (const double density : {1.0, 0.05, 0.01, 0.001}) {
    pair.set_density(density);
    CHECK(pair.capacity() == target_count(density, n));
    for (int i = 0; i < (density == 1.0 ? 1 : 3); ++i, ++t) pair.step(gradient_of(0, n, t), density, i != 1);
  }
  pair.step(gradient_of(7, n, t++), 0.001);
  pair.step(gradient_of(1, n, t++), 0.001);
}

TEST_CASE("topk on a GPU carries the CPU's bound and gets along with the list in steady state") {
  const OnGpu gpu;
  const std::size_t n = 20000, k = 200;
  const auto cpu = make_selector("topk");
  const auto selector = cuda::make_device_selector("topk", {}, {{0, n}});
  const OneRange one(n, 0.01, *selector);
  const DeviceVector<float> u_gpu(n), r_gpu(n);
  DeviceVector<StepParameters> parameters(1);
  DeviceVector<StepStatus> status(1);
  StepParameters step;
  step.density = 0.01;
  parameters.set({step});
  std::vector<float> residual(n);
  int good_lists = 0, long_lists = 0;
  for (std::uint32_t t = 0; t < 40; ++t) {
    std::vector<float> u = gradient_of(t == 30 ? 7 : t == 31 ? 12 : 0, n, t);
    if (t >= 15 && t < 20)  // more above the bound than the list holds
      for (float& x : u) x *= 1e4f;
    if (t >= 36) {  // just k above the bound
      for (std::size_t i = 0; i < n; ++i) u[i] = i % 100 == 0 ? 10.0f : 0.0f;
      std::fill(residual.begin(), residual.end(), 0.0f);
    }
    const bool good = t % 6 != 5 && t != 31;
    cuda::Accumulate a;
    a.u = u_gpu.data(), a.residual = r_gpu.data();
    to_device(u_gpu.data(), u);
    to_device(r_gpu.data(), residual);
    StepStatus said;
    said.bad = !good;
    status.set({said});
    selector->select(gpu.stream(), one.ranges(), a, parameters.data());
    selector->commit(gpu.stream(), one.ranges(), status.data(), {});
    Selection expected;
    SelectStep step;
    step.k = k;
    cpu->select(u, residual, step, expected);
    if (good)
      cpu->commit({});
    else
      cpu->discard();
    const cuda::DeviceDiagnostics now = selector->diagnostics(0);
    INFO("step " << t);
    CHECK(now.carried.kth == cpu->diagnostics().carried.kth);
    CHECK(now.carried.margin == cpu->diagnostics().carried.margin);
    if (!expected.finite) continue;
    CHECK((now.list == ListState::good) == !cpu->diagnostics().exact);
    CHECK(to_host(one.ranges().choices, 1)[0].whole == cpu->diagnostics().exact);
    good_lists += now.list == ListState::good;
    long_lists += now.list == ListState::too_many;
    CHECK(one.indices() == expected.indices);
    if (!good) continue;
    residual = u;
    for (const std::uint32_t i : expected.indices) residual[i] = 0;
  }
  CHECK(good_lists > 20);
  CHECK(long_lists > 0);
}

TEST_CASE("a step that takes everything teaches topk on a GPU no bound") {
  const OnGpu gpu;
  const std::size_t n = 300;
  const auto selector = cuda::make_device_selector("topk", {}, {{0, n}});
  const OneRange one(n, 1.0, *selector);
  DeviceVector<float> u(n);
  u.set(gradient_of(0, n, 1));
  StepParameters told;
  told.density = 1.0;
  DeviceVector<StepParameters> parameters(1);
  parameters.set({told});
  DeviceVector<StepStatus> status(1);
  status.set({StepStatus()});
  cuda::Accumulate a;
  a.u = u.data();
  selector->select(gpu.stream(), one.ranges(), a, parameters.data());
  selector->commit(gpu.stream(), one.ranges(), status.data(), {});
  CHECK(selector->diagnostics(0).carried.kth == -1);
}

TEST_CASE("topk on a GPU gives the golden selection") {
  const OnGpu gpu;
  SelectPair pair("topk", {}, 10007);
  pair.set_density(0.01);
  const auto selected = pair.step(fixture("cubic"), 0.01);
  CHECK(index_sum(selected.indices) == 492308);  // golden: float64, ties by lower index
}

}  // namespace
}  // namespace topknot::testing
