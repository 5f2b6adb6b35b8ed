#include "compress/select/passes/passes.h"
#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Whether the selection is the definition's, with the values of x.
bool is_topk(const Selection& selected, const std::vector<float>& x, std::size_t k) {
  if (!selected.finite || selected.indices != plain_topk(x, k) || selected.values.size() != k) return false;
  double smallest = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < k; ++i) {
    if (!same_bits(std::vector<float>{selected.values[i]}, std::vector<float>{x[selected.indices[i]]}))
      return false;
    smallest = std::min(smallest, double(std::abs(selected.values[i])));
  }
  return selected.threshold == smallest;
}

}  // namespace

TEST_CASE("exact topk gives the golden selection") {
  std::vector<float> x = fixture("cubic");
  const auto selector = make_selector("topk");
  const auto selected = select_k(*selector, x, 100);
  CHECK(index_sum(selected.indices) == 492308);
  CHECK(selected.threshold == Approx(0.970319568).epsilon(1e-6));
  double kept = 0, all = 0;
  for (const float v : x) all += double(v) * double(v);
  for (const float v : selected.values) kept += double(v) * double(v);
  CHECK((all - kept) / all == Approx(0.932111452).epsilon(1e-7));
}

TEST_CASE("topk equals its definition over a long run of error feedback, whatever is carried") {
  const std::size_t d = GENERATE(5u, 63u, 1000u, 70001u);
  const auto selector = make_selector("topk");
  std::vector<float> residual(d);
  std::size_t fast = 0, slow = 0;
  for (std::uint32_t t = 0; t < 120; ++t) {
    const CounterRng rng(7, RngUse::test, t);
    // A run's life: noise, a learning-rate drop, zeros, a constant, few distinct values, changes of k.
    double scale = t < 40 ? 1.0 : 1e-3;
    if (t > 100) scale = 1e6;
    std::vector<float> u(d);
    for (std::size_t i = 0; i < d; ++i) {
      double x = scale * rng.normal(i);
      if (t % 20 == 11) x = 0;
      if (t % 20 == 12) x = 0.25;
      if (t % 20 == 13) x = double(rng.bits(i) % 3) - 1;
      u[i] = float(x);
    }
    if (t == 60) std::fill(residual.begin(), residual.end(), 0.0f);
    const std::size_t k = std::max<std::size_t>(1, t == 0 ? d : t % 30 < 15 ? d / 100 : d / 7);
    std::vector<float> sum(d);
    for (std::size_t i = 0; i < d; ++i) sum[i] = u[i] + residual[i];
    const auto selected = select_k(*selector, u, k, residual);
    REQUIRE(is_topk(selected, sum, k));
    REQUIRE(same_bits(u, sum));
    (selector->diagnostics().exact ? slow : fast) += 1;
    if (t % 9 == 4) {
      selector->discard();
      continue;
    }
    keep_rest(*selector, selected, u, residual);
  }
  // The run went both ways, so the comparison meant something.
  CHECK(fast > 10);
  CHECK((slow > 3 || d < 1000));
}

TEST_CASE("topk does not depend on the carried threshold") {
  std::vector<float> x = normal_values(20000, 1, 3);
  for (const float carried : {0.0f, 1e-30f, 1.0f, 2.9f, 3.3f, 1e30f})
    for (const double margin : {0.004, 0.1}) {
      // A k-th magnitude that falls by half again and again widens the margin, one that stays narrows it.
      const auto selector = make_selector("topk");
      for (int step = 0; step < 41; ++step) {
        std::vector<float> taught(x.size());
        std::fill_n(taught.begin(), 20, margin == 0.1 && step % 2 ? 2 * carried : carried);
        select_k(*selector, taught, 20);
        selector->commit({});
      }
      REQUIRE(selector->diagnostics().carried.kth == key_of(carried));
      if (carried > 0) REQUIRE(selector->diagnostics().carried.margin == Approx(margin).epsilon(1e-12));
      CHECK(is_topk(select_k(*selector, x, 20), x, 20));
    }
}

TEST_CASE("a list of exactly k entries is long enough") {
  CHECK(list_state(true, 4, 5) == ListState::too_few);
  CHECK(list_state(true, 5, 5) == ListState::good);
  CHECK(list_state(false, 9, 5) == ListState::too_many);
}

TEST_CASE("ties at the k-th magnitude go to the lower index, also when there are too many to list") {
  std::vector<float> x(100000, -0.5f);
  x[99999] = 2.0f;
  x[50000] = 0.75f;
  x[7] = 0.0f;
  const auto selector = make_selector("topk");
  const auto selected = select_k(*selector, x, 10);
  CHECK(selected.indices == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 8, 50000, 99999});
  CHECK(is_topk(selected, x, 10));
  std::fill(x.begin(), x.end(), 0.0f);
  CHECK(is_topk(select_k(*selector, x, 10), x, 10));
}

TEST_CASE("denormal numbers are ordered like all others") {
  std::vector<float> x(9000);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = std::numeric_limits<float>::denorm_min() * float((i * 31) % 9000);
  const auto selector = make_selector("topk");
  for (int step = 0; step < 3; ++step) {
    CHECK(is_topk(select_k(*selector, x, 50), x, 50));
    selector->commit({});
  }
}

TEST_CASE("in steady state the carried threshold leaves few candidates and no fallback") {
  const std::size_t d = 200000, k = 200;
  const auto selector = make_selector("topk");
  std::vector<float> residual(d), u(d);
  double candidates = 0;
  int fallbacks = 0;
  for (std::uint32_t t = 0; t < 200; ++t) {
    const CounterRng rng(13, RngUse::test, t);
    for (std::size_t i = 0; i < d; ++i) u[i] = rng.uniform(i) - 0.5f + (rng.bits(i) % 64 == 0 ? 1.0f : 0.0f);
    const auto selected = select_k(*selector, u, k, residual);
    keep_rest(*selector, selected, u, residual);
    if (t < 100) continue;
    candidates += double(selector->diagnostics().candidates) / 100;
    fallbacks += selector->diagnostics().exact;
  }
  CHECK(fallbacks == 0);
  CHECK(candidates < 5.0 * k);
}

TEST_CASE("keep_largest is topk of what was selected") {
  Selection selected{{true, {3, 5, 9, 11, 20}, {-2, 1, 2, -3, 2}}};
  keep_largest(selected, 3);
  CHECK(selected.indices == std::vector<std::uint32_t>{3, 9, 11});
  CHECK(selected.values == std::vector<float>{-2, 2, -3});
  keep_largest(selected, 7);
  CHECK(selected.indices.size() == 3);
}
