// Every registered selection: extreme vectors, broken numbers, any number of threads.
#include <omp.h>

#include <limits>

#include "compress/select/selector.h"
#include "compress/state.h"
#include "tests/compress/select/select_once.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

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
  CompressOptions options;
  options.set("threshold", 0.75);
  options.seed = 3;
  if (!tried.option.empty()) options.set(tried.option, tried.choice);
  return selectors().find(tried.name).make(options);
}
std::vector<std::byte> state_of(const Selector& selector) {
  StateWriter writer;
  selector.save(writer);
  return writer.take();
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
    cases.back().push_back(std::numeric_limits<float>::denorm_min() * static_cast<float>((i * 31) % 3000));
  cases.push_back(noise(37, 1));
  cases.push_back(noise(3000, 2));
  cases.push_back(noise(3000, 3));
  for (float& v : cases.back()) v *= std::numeric_limits<float>::max() / 16.0f;
  return cases;
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
          CHECK(selected.indices.size() <= traits.target(density, x.size()));
        if (tried.name == "randk" || tried.name == "mstopk") CHECK(selected.indices.size() == k);
        selector->commit({});
      }
  }
}

TEST_CASE("a selector that sees a NaN or Inf selects nothing and forgets the step") {
  for (const Tried& tried : tried_selectors()) {
    const auto selector = make(tried), fresh = make(tried);
    for (const auto& x : {noise(40000, 1), noise(40000, 2)}) {
      select_from_copy(*selector, x, {});
      selector->commit({});
      select_from_copy(*fresh, x, {});
      fresh->commit({});
    }
    const auto before = state_of(*selector);
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      for (const std::size_t at : {0u, 20003u, 39999u})
        for (const double density : {0.01, 1.0}) {
          INFO(tried.name << " " << bad << " at " << at);
          std::vector<float> u = noise(40000, 3), addend(u.size());
          addend[at] = static_cast<float>(bad);
          const auto selected = select_once(*selector, u, addend, {density});
          CHECK_FALSE(selected.finite);
          CHECK(selected.indices.empty());
          CHECK(selected.values.empty());
          selector->discard();
        }
    CHECK(state_of(*selector) == before);
    const std::vector<float> next = noise(40000, 4);
    CHECK(select_from_copy(*selector, next, {}).indices == select_from_copy(*fresh, next, {}).indices);
  }
}

TEST_CASE("what selectors select does not depend on the number of threads") {
  const std::vector<float> g = noise(400003, 1, 1.5), residual = noise(400003, 2);
  const int before = omp_get_max_threads();
  for (const Tried& tried : tried_selectors())
    for (const double density : {0.2, 0.001}) {
      INFO(tried.name << " " << tried.choice << " at " << density);
      std::vector<Selection> results;
      for (const int threads : {1, 3}) {
        omp_set_num_threads(threads);
        const auto selector = make(tried);
        std::vector<float> u = g;
        for (int step = 0; step < 7; ++step) {
          u = g;
          results.push_back(select_once(*selector, u, residual, {density, step}));
          selector->commit({});
        }
      }
      omp_set_num_threads(before);
      for (std::size_t i = 0; i < 7; ++i) {
        CHECK(results[i].indices == results[i + 7].indices);
        CHECK(same_bits(results[i].values, results[i + 7].values));
        CHECK(results[i].threshold == results[i + 7].threshold);
      }
    }
}

TEST_CASE("a discarded selection leaves no trace in the next one") {
  for (const Tried& tried : tried_selectors()) {
    const auto a = make(tried), b = make(tried);
    for (int step = 0; step < 12; ++step) {
      const auto x = noise(20000, static_cast<std::uint32_t>(step), step < 6 ? 0.5 : 3);
      select_from_copy(*a, noise(20000, 99, 4), {0.01, step});
      a->discard();
      const auto one = select_from_copy(*a, x, {0.01, step}), other = select_from_copy(*b, x, {0.01, step});
      REQUIRE(one.indices == other.indices);
      CHECK(state_of(*a) == state_of(*b));
      a->commit({});
      b->commit({});
    }
  }
}
