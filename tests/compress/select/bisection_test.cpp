// Selections that look for a threshold by halving: redsync, trimmed_topk, mstopk.
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
      mean += std::abs(double(v)) / double(x.size());
      max = std::max(max, std::abs(double(v)));
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
    const double n = double(trace.back().count);
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
    n = double(trace.back().count);
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
        const double k = double(target_count(density, d));
        check_trace("redsync", x, density, plain_redsync(x, k), 0);
        const auto trimmed = plain_trimmed(x, k);
        if (trimmed.back().threshold >= 0) check_trace("trimmed_topk", x, density, trimmed, 0);
      }
}

TEST_CASE("redsync and trimmed_topk select a vector of one magnitude exactly") {
  const auto redsync = make_selector("redsync");
  const auto trimmed = make_selector("trimmed_topk");
  for (const double c : {0.0, 0.1, -7.0}) {
    std::vector<float> x(5000, float(c));
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

namespace {

// The paper's loop, each threshold by its own count; all 30 bisections.
struct PlainBracket {
  double t1 = HUGE_VAL, t2 = 0;
  std::size_t count1 = 0, count2 = 0;
};
PlainBracket plain_bracket(const std::vector<float>& x, std::size_t k) {
  double mean = 0, max = 0;
  std::vector<double> sorted;
  for (const float v : x) sorted.push_back(std::abs(double(v)));
  for (const double a : sorted) mean += a, max = std::max(max, a);
  mean /= double(x.size());
  std::sort(sorted.begin(), sorted.end());
  PlainBracket b;
  b.count2 = x.size();
  double low = 0, high = 1;
  for (int i = 0; i < 30; ++i) {
    const double q = (low + high) / 2, t = mean + q * (max - mean);
    const auto count = std::size_t(sorted.end() - std::lower_bound(sorted.begin(), sorted.end(), t));
    if (count <= k) {
      high = q;
      if (count > b.count1) b.count1 = count, b.t1 = t;
    } else {
      low = q;
      if (count < b.count2) b.count2 = count, b.t2 = t;
    }
  }
  return b;
}

// Whether everything that reaches t1 was selected, and of the rest a run of neighbours that makes up k.
bool is_mstopk(const Selection& selected, const std::vector<float>& x, const PlainBracket& b, std::size_t k) {
  if (!well_formed(selected, x) || selected.indices.size() != k) return false;
  const std::set<std::uint32_t> chosen(selected.indices.begin(), selected.indices.end());
  std::string between;
  for (std::uint32_t i = 0; i < x.size(); ++i) {
    const double a = std::abs(double(x[i]));
    if (a >= b.t1 && !chosen.count(i)) return false;
    if (a < b.t2 && b.count1 < k && chosen.count(i)) return false;
    if (a < b.t1 && a >= b.t2) between += chosen.count(i) ? '1' : '0';
  }
  const std::string run(k - b.count1, '1');
  return between.find(run) != std::string::npos &&
         std::size_t(std::count(between.begin(), between.end(), '1')) == run.size();
}

}  // namespace

TEST_CASE("mstopk selects exactly k: what reaches one threshold, and a run of what reaches the other") {
  for (const std::size_t d : {7u, 3000u, 100000u})
    for (const double power : {0.2, 1.0, 3.0})
      for (const double density : {0.6, 0.05, 0.001}) {
        INFO(d << " " << power << " " << density);
        const std::vector<float> x = noise(d, 1, power);
        const std::size_t k = target_count(density, d);
        const auto selector = make_selector("mstopk");
        const auto selected = select_from_copy(*selector, x, {density, 3, 1, 50});
        const PlainBracket expected = plain_bracket(x, k);
        const auto trace = selector->diagnostics().trace;  // the two thresholds
        CHECK(trace[0].count == expected.count1);
        CHECK(trace[1].count >= expected.count2);  // it stops where k reach t1
        CHECK(is_mstopk(selected, x, expected, k));
      }
}

TEST_CASE("where 30 bisections tell all magnitudes apart, mstopk is topk") {
  const std::vector<float> x = noise(10007, 2);
  const auto selector = make_selector("mstopk");
  for (const double density : {0.001, 0.01, 0.1})
    CHECK(select_from_copy(*selector, x, {density}).indices == plain_topk(x, target_count(density, 10007)));
}

TEST_CASE("of equal magnitudes mstopk selects a run of k, elsewhere at other steps and ranks") {
  const double c = GENERATE(0.0, 0.1, 3.0);
  std::vector<float> x(30000, float(c));
  const auto selector = make_selector("mstopk");
  std::set<std::uint32_t> starts;
  for (int t = 0; t < 40; ++t) {
    const auto selected = select_from_copy(*selector, x, {0.01, t / 2, t % 2});
    REQUIRE(selected.indices.size() == 300);
    REQUIRE(selected.indices.back() - selected.indices.front() == 299);
    starts.insert(selected.indices.front());
  }
  CHECK(starts.size() > 35);
  CHECK(*starts.rbegin() - *starts.begin() > 20000);
  const auto again = select_from_copy(*selector, x, {0.01, 7, 1});
  CHECK(select_from_copy(*selector, x, {0.01, 7, 1}).indices == again.indices);
}

TEST_CASE("mstopk's run may start at the first and at the last place, and every place between is as likely") {
  // Two large ones, and two of the four equal others: three places for the run.
  const std::vector<float> x = {1, 5, 1, 1, -6, 1};
  const auto selector = make_selector("mstopk");
  std::map<std::vector<std::uint32_t>, int> counts;
  for (int t = 0; t < 900; ++t) ++counts[select_from_copy(*selector, x, {0.7, t}).indices];
  CHECK(counts.size() == 3);
  for (const std::vector<std::uint32_t>& run :
       {std::vector<std::uint32_t>{0, 1, 2, 4}, {1, 2, 3, 4}, {1, 3, 4, 5}}) {
    CHECK(counts[run] > 240);
    CHECK(counts[run] < 360);
  }
}

TEST_CASE("mstopk's thirtieth bisection parts what the twenty-ninth does not") {
  // The mean depends on the two entries: this is where the threshold of q = 2^-30 lies between them.
  const double q = 0x1p-30, share = (1 - q) / 1000, t = (share + q) / (1 - 2 * share);
  std::vector<float> x(1000);
  x[500] = 1, x[200] = float(t - 0x1p-31), x[700] = float(t + 0x1p-31);
  const auto selector = make_selector("mstopk");
  for (int step = 0; step < 10; ++step)
    CHECK(select_from_copy(*selector, x, {0.002, step}).indices == std::vector<std::uint32_t>{500, 700});
}
