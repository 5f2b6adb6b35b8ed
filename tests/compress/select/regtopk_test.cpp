#include "compress/select/regtopk_score.h"
#include "compress/sparse.h"
#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// What a rank remembers by the definition: dense, one flag per entry.
struct Remembered {
  std::vector<bool> mask;
  std::vector<float> sent, average;
  double weight = 1;
};

// The definition: every entry's score, sorted.
std::vector<std::uint32_t> by_definition(const std::vector<float>& a, const Remembered& last, std::size_t k,
                                         const CompressOptions& options) {
  std::vector<float> scores(a.size());
  for (std::size_t j = 0; j < a.size(); ++j) {
    double delta = options.given<double>("q");
    if (!last.mask.empty() && last.mask[j]) {
      const double d = options.given<std::string>("variant") == "A" ? last.weight * last.sent[j]
                                                                    : last.weight * a[j] + 1e-10;
      if (d != 0) delta = (last.average[j] - last.weight * last.sent[j]) / d;
    }
    scores[j] = float(std::abs(double(a[j])) * std::tanh(std::abs(1 + delta) / options.given<double>("mu")));
  }
  return plain_topk(scores, k);
}

}  // namespace

TEST_CASE("variant B's guard is not weighted: 20 ranks of which two send 4e-10") {
  const float sent = 4e-10f;
  const double weight = 0.05, average = 2 * weight * double(sent);
  const RegTopKScore score{.mu = 2, .rest = 1, .by_current = true};
  const double own = weight * double(sent);
  // Delta = 2e-11 / (0.05 * 4e-10 + 1e-10) = 1 / 6
  CHECK(score(sent, weight, own, average - own, std::numeric_limits<float>::max()) ==
        Approx(double(sent) * std::tanh(7.0 / 12)).epsilon(1e-6).margin(0));
}

TEST_CASE("regtopk selects what its definition selects, over many steps") {
  const std::string variant = GENERATE("A", "B");
  const auto [mu, q] = GENERATE(table<double, double>({{4, 1e8}, {0.3, 1e8}, {4, 3.0}, {1e4, 2.0}}));
  CAPTURE(variant, mu, q);
  const CompressOptions options = regtopk_options(mu, variant, q);
  const std::size_t d = 6000;
  const auto selector = make_selector("regtopk", options);
  Remembered last;
  std::vector<float> residual(d);
  int fast = 0, reordered = 0, fell_back = 0;
  for (std::uint32_t t = 0; t < 60; ++t) {
    const CounterRng rng(31, RngUse::test, t);
    const std::size_t k = t % 20 < 15 ? 60 : 200;
    std::vector<float> u(d), a(d);
    for (std::size_t j = 0; j < d; ++j) {
      // Some entries are large in every step, so that what was sent just now competes again.
      u[j] = float(rng.normal(j) * (j % 50 == 0 ? 40.0f : 1.0f));
      a[j] = u[j] + residual[j];
    }
    const Selection selected = select_k(*selector, u, k, residual);
    REQUIRE(same_bits(u, a));
    REQUIRE(selected.indices == by_definition(a, last, k, options));
    for (std::size_t i = 0; i < k; ++i) REQUIRE(selected.values[i] == a[selected.indices[i]]);
    fell_back += selector->diagnostics().exact;
    fast += !selector->diagnostics().exact;
    reordered += selected.indices != plain_topk(a, k);

    // Averages that keep all of an entry, none of it, more, its opposite, or a part.
    std::vector<float> average(d);
    const double weight = 0.25 * (1 + t % 3);
    for (std::size_t i = 0; i < k; ++i) {
      const double own = weight * double(selected.values[i]);
      const double kept[] = {1, 0, 3, -1, 0.1 * rng.normal(d + i)};
      average[selected.indices[i]] = float(kept[i % 5] * own);
    }
    commit(*selector, selected, average, weight);
    last = {std::vector<bool>(d), std::vector<float>(d), average, weight};
    residual = a;
    for (std::size_t i = 0; i < k; ++i) {
      last.mask[selected.indices[i]] = true;
      last.sent[selected.indices[i]] = selected.values[i];
      residual[selected.indices[i]] = 0;
    }
  }
  CHECK(reordered > 10);
  CHECK(fell_back >= 1);
  if (q / mu > 20) CHECK(fast > 20);
}

TEST_CASE("regtopk's distortion takes uneven weights into account") {
  // 1.5 * 2 / 2 and 0.5 * -6 / 2 cancel; with equal weights they would not.
  for (const bool uneven : {true, false}) {
    SimulatedRanks ranks(regtopk_options(4), whole_group(2, 2));
    ranks[0].gradient = {2, 0};
    ranks[1].gradient = {-6, 0};
    ranks.step(0, 0.5, uneven ? std::vector<float>{1.5f, 0.5f} : std::vector<float>{});
    CHECK((ranks[0].average[0] == 0) == uneven);
    // Without cancellation 1 + Delta is -2 for rank 0 and 2/3 for rank 1: tanh(0.5), tanh(1/6).
    ranks[0].gradient = {1, 0.4f};
    ranks[1].gradient = {1, 0.1f};
    ranks.step(1, 0.5);
    for (std::size_t r = 0; r < 2; ++r)
      CHECK(ranks.sent()[r].indices == std::vector<std::uint32_t>{uneven ? 1u : 0u});
  }
}

TEST_CASE("regtopk: variant A keeps the full weight of an entry that was sent as zero") {
  // B divides by the current value instead: Delta is 0, the weight tanh(1/4).
  for (const std::string variant : {"A", "B"}) {
    const auto selector = make_selector("regtopk", regtopk_options(4, variant));
    std::vector<float> zeros(3), next = {-2, 1.9f, 0};
    const auto sent = select_k(*selector, zeros, 1);
    REQUIRE(sent.indices == std::vector<std::uint32_t>{0});
    commit(*selector, sent, zeros, 0.5);
    CHECK(select_k(*selector, next, 1).indices[0] == (variant == "A" ? 0 : 1));
  }
}

TEST_CASE("regtopk validates its options and refuses the ef21 memory") {
  CHECK_THROWS_WITH(make_selector("regtopk", regtopk_options(0)), Catch::Contains("compress.mu"));
  CHECK_THROWS_WITH(make_selector("regtopk", regtopk_options(4, "C")),
                    Catch::Contains("compress.variant must be A | B, not 'C'"));
  CHECK_THROWS_WITH(make_selector("regtopk", regtopk_options(4, "A", 0)), Catch::Contains("compress.q"));
  SparsePreset parts = sparse_presets().find("regtopk");
  CHECK(parts.memory == "residual");
  parts.memory = "ef21";
  CHECK_THROWS_WITH(check_combination(parts, regtopk_options()),
                    Catch::Contains("ef21") && Catch::Contains("regtopk"));
}
