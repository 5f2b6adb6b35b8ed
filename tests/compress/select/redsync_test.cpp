#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Evaluation {
  double q, threshold;
  std::size_t count;
};
struct Plain {
  double mean = 0, max = 0;
  explicit Plain(const std::vector<float>& x) {
    for (const float v : x) {
      mean += std::abs(static_cast<double>(v)) / static_cast<double>(x.size());
      max = std::max(max, std::abs(static_cast<double>(v)));
    }
  }
  Evaluation at(const std::vector<float>& x, double q) const {
    const double t = mean + q * (max - mean);
    return {q, t, positions_above(x, t).size()};
  }
};

// The rules as written down, each threshold by its own count.
std::vector<Evaluation> plain_redsync(const std::vector<float>& x, double k) {
  const Plain plain(x);
  std::vector<Evaluation> trace;
  double l = 0, r = 1;
  while (r - l > 0.2) {
    trace.push_back(plain.at(x, l + (r - l) / 2));
    const double n = static_cast<double>(trace.back().count);
    if (n > k && 2 * k > n) break;
    if (n < k / 2)
      r = trace.back().q;
    else
      l = trace.back().q;
  }
  return trace;
}
std::vector<Evaluation> plain_trimmed(const std::vector<float>& x, double k) {
  const Plain plain(x);
  std::vector<Evaluation> trace;
  double q = 0.8, n = 0;
  while (n < k) {
    trace.push_back(plain.at(x, q));
    n = static_cast<double>(trace.back().count);
    q -= 0.2;
  }
  return trace;
}

void check_trace(const std::string& name, const std::vector<float>& x, double density,
                 const std::vector<Evaluation>& expected, std::size_t slack) {
  const auto selector = make_selector(name);
  const auto selected = select_from_copy(*selector, x, {density});
  const auto trace = selector->diagnostics().trace;
  REQUIRE(trace.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(trace[i].threshold == Approx(expected[i].threshold).epsilon(slack > 0 ? 1e-6 : 2e-9));
    CHECK(trace[i].count + slack >= expected[i].count);
    CHECK(trace[i].count <= expected[i].count + slack);
  }
  CHECK(selected.threshold == trace.back().threshold);
  CHECK(selected.indices == positions_above(x, selected.threshold));
  CHECK(well_formed(selected, x));
}

}  // namespace

TEST_CASE("redsync and trimmed_topk give the golden traces") {
  // Golden values: computed in float64; counts may differ by 2.
  const std::vector<float> x = fixture("cubic");
  const std::size_t slack = 2;
  check_trace("redsync", x, 0.01,
              {{0.5, 0.625000005, 1451}, {0.75, 0.812500002, 669}, {0.875, 0.906250001, 323}}, slack);
  check_trace("trimmed_topk", x, 0.01, {{0.8, 0.850000002, 527}}, slack);
}

TEST_CASE("redsync and trimmed_topk keep to their rules on other vectors") {
  // 1e5 elements: the lists of a low threshold are too long to keep, those of a high one are not.
  for (const std::size_t d : {40u, 10007u, 100000u})
    for (const double power : {0.2, 1.0, 3.0})
      for (const double density : {0.3, 0.05, 0.001}) {
        INFO(d << " " << power << " " << density);
        const std::vector<float> x = noise(d, 1, power);
        const double k = static_cast<double>(target_count(density, d));
        check_trace("redsync", x, density, plain_redsync(x, k), 0);
        const auto trimmed = plain_trimmed(x, k);
        if (trimmed.back().threshold >= 0) check_trace("trimmed_topk", x, density, trimmed, 0);
      }
}

TEST_CASE("redsync and trimmed_topk select a vector of one magnitude exactly") {
  const auto redsync = make_selector("redsync");
  const auto trimmed = make_selector("trimmed_topk");
  for (const double c : {0.0, 0.1, -7.0}) {
    std::vector<float> x(5000, static_cast<float>(c));
    for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
    CHECK(select_from_copy(*redsync, x, {}).indices == plain_topk(x, 50));
    CHECK(redsync->diagnostics().trace.empty());
    CHECK(select_from_copy(*trimmed, x, {}).indices == plain_topk(x, 50));
    CHECK(trimmed->diagnostics().exact);
  }
}

TEST_CASE("trimmed_topk ends where fewer than k entries are not zero, and sends k") {
  const auto selector = make_selector("trimmed_topk");
  std::vector<float> x(5000);
  x[10] = 1, x[4000] = -0.5, x[77] = 1e-30f;
  CHECK(select_from_copy(*selector, x, {}).indices == plain_topk(x, 50));
  CHECK(selector->diagnostics().exact);
  // The k largest are not all above t until t is below 0: exactly k then, not everything.
  x = noise(5000, 2);
  x[0] = 1000;
  CHECK(select_from_copy(*selector, x, {0.9}).indices == plain_topk(x, 4500));
  CHECK(selector->diagnostics().exact);
}
