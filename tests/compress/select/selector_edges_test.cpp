// Every registered selection: extreme vectors, broken numbers, any number of threads.
#include "compress/select/passes/magnitude_passes.h"
#include "tests/compress/select/select_once.h"
#include "tests/support/any_threads.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// A registered selection with one choice of each option that has choices.
struct Tried {
  std::string name, option, choice;
};
std::vector<Tried> tried_selectors() {
  std::vector<Tried> tried;
  for (const std::string& name : selectors().names()) {
    const std::size_t before = tried.size();
    for (const Option& option : selectors().options(name))
      for (const std::string& choice : option.choices) tried.push_back({name, option.name, choice});
    if (tried.size() == before) tried.push_back({name, "", ""});
  }
  return tried;
}

std::unique_ptr<Selector> make(const Tried& tried) {
  CompressOptions options = named(tried.name, {"threshold=0.75", "seed=3"});
  if (!tried.option.empty()) options.set(tried.option, tried.choice);
  return selectors().find(tried.name).make(options);
}

std::vector<std::vector<float>> edge_cases() {
  std::vector<std::vector<float>> cases = {{0.0f}, {-2.0f}, {1.0f, 1.0f}, std::vector<float>(3000)};
  cases.push_back(std::vector<float>(3000, 0.1f));
  cases.push_back(std::vector<float>(3000, std::numeric_limits<float>::max()));
  cases.push_back(std::vector<float>(3000, std::numeric_limits<float>::denorm_min()));
  cases.emplace_back(3000);
  cases.back()[1234] = -3.0f;
  cases.emplace_back();
  for (int i = 0; i < 3000; ++i)
    cases.back().push_back(std::numeric_limits<float>::denorm_min() * float((i * 31) % 3000));
  cases.push_back(noise(37, 1));
  cases.push_back(noise(3000, 2));
  cases.push_back(noise(3000, 3));
  for (float& v : cases.back()) v *= std::numeric_limits<float>::max() / 16.0f;
  return cases;
}

// In two passes, in long double.
MagnitudeMoments plain_moments(const std::vector<float>& x, double above) {
  MagnitudeMoments m;
  long double sum = 0, squares = 0, about = 0;
  m.smallest = std::numeric_limits<double>::infinity();
  std::vector<double> tail;
  for (const float v : x)
    if (std::abs(double(v)) > above) tail.push_back(std::abs(double(v)));
  for (const double a : tail) {
    sum += a;
    squares += static_cast<long double>(a) * a;
    m.smallest = std::min(m.smallest, a);
    m.largest = std::max(m.largest, a);
  }
  m.count = tail.size();
  m.mean = double(sum / m.count);
  for (const double a : tail) about += (a - sum / m.count) * (a - sum / m.count);
  m.variance = double(about / (m.count - 1));
  m.norm = double(std::sqrt(squares));
  return m;
}

void check_same(const MagnitudeMoments& a, const MagnitudeMoments& b) {
  CHECK(a.count == b.count);
  CHECK(a.mean == Approx(b.mean).epsilon(1e-13));
  CHECK(a.variance == Approx(b.variance).epsilon(1e-11));
  CHECK(a.norm == Approx(b.norm).epsilon(1e-13));
  CHECK(a.smallest == b.smallest);
  CHECK(a.largest == b.largest);
}

CompressOptions threshold_of(double t) {
  CompressOptions options;
  options.set("threshold", t);
  return options;
}

}  // namespace

TEST_CASE("selectors accept extreme vectors, at any density") {
  for (const Tried& tried : tried_selectors()) {
    const auto selector = make(tried);
    for (const std::vector<float>& x : edge_cases())
      for (const double density : {1.0, 0.9, 0.5, 0.01, 1e-9}) {
        INFO(tried.name << " " << tried.choice << " " << x.size() << " of " << x[0] << " at " << density);
        const std::size_t k = target_count(density, x.size());
        std::vector<float> u = x;
        const auto selected = select_once(*selector, u, {}, {density});
        CHECK(same_bits(u, x));
        CHECK(selected.finite);
        CHECK(well_formed(selected, x));
        CHECK(!std::isnan(selected.threshold));
        if (density == 1.0) CHECK(selected.indices.size() == k);
        if (const SelectorTraits& traits = selectors().find(tried.name).traits; traits.at_most_k)
          CHECK(selected.indices.size() <= traits.target(density, x.size(), {}));
        if (std::set<std::string>{"topk", "randk", "mstopk", "regtopk"}.contains(tried.name))
          CHECK(selected.indices.size() == k);
        selector->commit({});
      }
  }
}

TEST_CASE("a selector that sees a NaN or Inf selects nothing and forgets the step") {
  using Limits = std::numeric_limits<float>;
  for (const Tried& tried : tried_selectors())
    for (const std::size_t d : {1u, 50u, 40000u})
      for (const bool later : {false, true}) {
        const auto selector = make(tried), fresh = make(tried);
        for (std::uint32_t t = 1; later && t < 3; ++t)
          for (Selector* const one : {selector.get(), fresh.get()})
            commit(*one, select_from_copy(*one, noise(d, t), {}), std::vector<float>(d), 1);
        const std::vector<std::byte> before = saved(*selector);
        const CarriedBound carried = selector->diagnostics().carried;
        const std::vector<float> good = noise(d, 3);
        const auto refused = [&](std::vector<float> u, const std::vector<float>& addend, double density) {
          const Selection selected = select_once(*selector, u, addend, {density});
          CHECK_FALSE(selected.finite);
          CHECK(selected.indices.empty());
          CHECK(selected.values.empty());
          selector->discard();
        };
        for (const float bad :
             {Limits::quiet_NaN(), -Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()})
          for (const std::size_t at : {0u, 15u, 4097u, 20003u, 39999u})
            for (const double density : {0.01, 1.0}) {
              INFO(tried.name << " of " << d << ", " << bad << " at " << at);
              std::vector<float> spoilt = good, addend(d);
              spoilt[at % d] = addend[at % d] = bad;
              refused(spoilt, {}, density);
              refused(good, addend, density);
            }
        const std::vector<float> largest(d, Limits::max());
        refused(largest, largest, 0.01);  // finite in both, not in the sum
        CHECK(saved(*selector) == before);
        CHECK(selector->diagnostics().carried == carried);
        const std::vector<float> next = noise(d, 4);
        CHECK(select_from_copy(*selector, next, {}).indices == select_from_copy(*fresh, next, {}).indices);
      }
}

TEST_CASE("what selectors select does not depend on the number of threads") {
  const std::size_t d = 400003;
  const std::vector<float> g = noise(d, 1, 1.5), residual = noise(d, 2);
  for (const Tried& tried : tried_selectors())
    for (const double density : {0.2, 0.001}) {
      INFO(tried.name << " " << tried.choice << " at " << density);
      check_any_threads([&] {
        const auto selector = make(tried);
        std::vector<std::tuple<std::vector<std::uint32_t>, std::vector<float>, double, std::vector<float>>>
            all;
        for (int step = 0; step < 9; ++step) {
          std::vector<float> u = g;
          // The last steps list far too many entries: all of them in one thread's part, and all there are.
          for (std::size_t i = 0; step >= 6 && i < d / 8; ++i) u[i] *= 1000;
          if (step == 8) u.assign(d, 2);
          const Selection selected =
              select_once(*selector, u, step == 8 ? std::vector<float>() : residual, {density, step});
          commit(*selector, selected, std::vector<float>(d), 0.5);
          all.emplace_back(selected.indices, selected.values, selected.threshold, u);
        }
        return std::pair(all, saved(*selector));
      });
    }
}

TEST_CASE("a discarded selection leaves no trace, and a saved state goes on as the one it was saved from") {
  const std::size_t d = 20000;
  // The other ranks' contributions make something else of each value that was sent.
  const auto advance = [&](Selector& selector, const std::vector<float>& x, int step) {
    const Selection selected = select_from_copy(selector, x, {0.01, step});
    std::vector<float> average(d);
    for (std::size_t i = 0; i < selected.indices.size(); ++i)
      average[selected.indices[i]] = (i % 5 == 0 ? 0.0f : 0.3f - 0.2f * float(i % 3)) * selected.values[i];
    commit(selector, selected, average, 0.25);
    return selected;
  };
  std::set<std::string> state_mattered;
  for (const Tried& tried : tried_selectors()) {
    INFO(tried.name << " " << tried.choice);
    const auto straight = make(tried), disturbed = make(tried);
    std::unique_ptr<Selector> resumed, fresh;
    bool differs = false;
    for (int step = 0; step < 24; ++step) {
      const auto x = noise(d, std::uint32_t(step), step < 6 ? 0.5 : step < 13 ? 0.3 : 2.5);
      select_from_copy(*disturbed, noise(d, 99, 4), {0.01, step});
      disturbed->discard();
      if (step == 13) {
        resumed = make(tried), fresh = make(tried);
        restore(*resumed, saved(*straight));
      }
      const Selection one = advance(*straight, x, step);
      if (fresh) {
        const Selection other = advance(*fresh, x, step);
        differs |= other.indices != one.indices || other.threshold != one.threshold;
      }
      for (Selector* const other : {disturbed.get(), resumed.get()}) {
        if (!other) continue;
        const Selection same = advance(*other, x, step);
        REQUIRE(same.indices == one.indices);
        CHECK(same_bits(same.values, one.values));
        CHECK(same.threshold == one.threshold);
        CHECK(saved(*other) == saved(*straight));
      }
    }
    if (differs) state_mattered.insert(tried.name);
    std::vector<std::byte> state = saved(*straight);
    if (state.empty()) continue;
    state.resize(state.size() / 2);
    CHECK_THROWS_AS(restore(*resumed, state), Error);
  }
  for (const std::string name : {"regtopk", "sidco", "gaussiank_calibrated"})
    CHECK(state_mattered.contains(name));
}

TEST_CASE("the moments of magnitudes are those of the definition, of all and of a tail") {
  const std::size_t n = GENERATE(2u, 15u, 16u, 1000u, 70001u);
  const std::vector<float> x = noise(n, 1, 2), addend = noise(n, 2);
  std::vector<float> sum(n), u = x;
  for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + addend[i];
  check_same(accumulate_with_magnitudes(std::span<float>(u), std::span<const float>(addend)),
             plain_moments(sum, -1));
  CHECK(same_bits(u, sum));
  const double t = n < 100 ? 0.0 : 1.5;
  check_same(magnitudes_above(std::span<const float>(sum), t), plain_moments(sum, t));
  CHECK(count_above(std::span<const float>(sum), key_below(t)) == plain_moments(sum, t).count);
}

TEST_CASE("a constant has its magnitude as mean and variance 0, exactly") {
  std::vector<float> x(50001, 0.1f);
  for (std::size_t i = 0; i < x.size(); i += 3) x[i] = -x[i];
  const auto m = accumulate_with_magnitudes(std::span<float>(x), std::span<const float>());
  CHECK(m.mean == double(0.1f));
  CHECK(m.variance == 0);
  CHECK(m.constant());
  CHECK(magnitudes_above(std::span<const float>(x), 1.0).count == 0);
}

TEST_CASE("a value near the largest gives the same mean of magnitudes wherever it lies") {
  const std::size_t n = 50001;
  for (const std::size_t at : {std::size_t{0}, n / 2, n - 1, std::size_t{77}}) {
    std::vector<float> x(n, 1.0f);
    x[at] = -std::numeric_limits<float>::max();
    INFO("at " << at);
    CHECK(accumulate_with_magnitudes(x, {}).mean ==
          Approx(double(std::numeric_limits<float>::max()) / double(n)).epsilon(1e-13));
  }
}

TEST_CASE("the mean logarithm of magnitudes is that of the definition, zeros included") {
  std::vector<float> x = noise(40007, 4);
  std::fill(x.begin() + 100, x.begin() + 900, 0.0f);
  const double norm = plain_moments(x, -1).norm;
  long double sum = 0;
  for (const float v : x) sum += std::log(std::abs(double(v)) / norm + 0x1p-52);
  CHECK(mean_log_magnitude(std::span<const float>(x), norm) == Approx(double(sum / x.size())).epsilon(1e-12));
}

TEST_CASE("a key of what reaches a threshold separates the numbers around it") {
  for (const double t : {0.1, 0.5, 1.0, 3e-45, 1e30, 0.30000000000000004}) {
    const MagnitudeKey key = key_reaching(t);
    float x = float(t);
    for (int i = 0; i < 3; ++i) x = std::nextafter(x, 0.0f);
    for (int i = 0; i < 6; ++i, x = std::nextafter(x, std::numeric_limits<float>::max()))
      CHECK((key_of(x) > key) == (double(x) >= t));
  }
  CHECK(key_reaching(0) == -1);
  CHECK(key_reaching(-1) == -1);
}

TEST_CASE("a threshold search counts and takes what exceeds, with and without a list") {
  const std::vector<float> x = noise(300000, 5);
  for (const std::size_t limit : {10u, 1000u, 1000000u}) {
    ThresholdSearch search;
    search.start(x, limit);
    for (const double t : {2.0, 3.5, 2.5, 0.5, 3.0, -1.0, 9.0}) {
      const std::vector<std::uint32_t> expected = positions_above(x, t);
      CHECK(search.count(key_below(t)) == expected.size());
      Selection selected;
      search.take(key_below(t), expected.size(), selected);
      CHECK(selected.indices == expected);
      CHECK(well_formed(selected, x));
    }
  }
}

TEST_CASE("a magnitude at the bound does not belong to the tail, also behind the last whole block") {
  std::vector<float> x(16 + 4, 2.0f);
  x[3] = 3, x[18] = -3;
  CHECK(magnitudes_above(std::span<const float>(x), 2.0).count == 2);
}

TEST_CASE("threshold selects what exceeds it, strictly, whatever the density") {
  const auto selector = make_selector("threshold", threshold_of(0.5));
  const std::vector<float> x = {0.5f, -0.5f, std::nextafter(0.5f, 1.0f), -3, 0};
  const auto selected = select_from_copy(*selector, x, {0.2});
  CHECK(selected.indices == std::vector<std::uint32_t>{2, 3});
  CHECK(well_formed(selected, x));
  CHECK(selected.threshold == 0.5);
  CHECK(select_from_copy(*selector, x, {0.9}).indices == selected.indices);
}

TEST_CASE("threshold holds for a single element too, of which k is all; density 1 sends everything") {
  const auto selector = make_selector("threshold", threshold_of(0.5));
  CHECK(select_from_copy(*selector, {0.1f}, {0.001}).indices.empty());
  CHECK(select_from_copy(*selector, {0.6f}, {0.001}).indices.size() == 1);
  CHECK(select_from_copy(*selector, {0.1f}, {1.0}).indices.size() == 1);
}

TEST_CASE("threshold finds all of few, of many, and of few again") {
  const auto selector = make_selector("threshold", threshold_of(1.25));
  std::vector<float> residual = noise(200000, 1);
  for (const double scale : {0.5, 10.0, 0.01, 1.0}) {
    std::vector<float> u = residual;
    for (float& v : u) v *= float(scale);
    std::vector<float> sum = u;
    for (std::size_t i = 0; i < u.size(); ++i) sum[i] += residual[i];
    const auto selected = select_once(*selector, u, residual, {});
    CHECK(u == sum);
    CHECK(selected.indices == positions_above(sum, 1.25));
    CHECK(well_formed(selected, sum));
    selector->commit({});
  }
}

TEST_CASE("a threshold of 0 or below, or none at all, is refused with the key's name") {
  for (const double t : {0.0, -1.0, std::nan(""), HUGE_VAL})
    CHECK_THROWS_WITH(make_selector("threshold", threshold_of(t)), Catch::Contains("compress.threshold "));
  CHECK_THROWS_AS(make_selector("threshold", threshold_of(0)), UserError);
}

TEST_CASE("a threshold beyond float's range selects nothing, the least double all that is not zero") {
  std::vector<float> x = {0.0f, -1e-45f, 1e38f};
  const auto high = make_selector("threshold", threshold_of(1e300)),
             low = make_selector("threshold", threshold_of(5e-324));
  CHECK(select_from_copy(*high, x, {0.5}).indices.empty());
  CHECK(select_from_copy(*low, x, {0.5}).indices == std::vector<std::uint32_t>{1, 2});
}
