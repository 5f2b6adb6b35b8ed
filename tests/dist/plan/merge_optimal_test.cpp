#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>

#include "dist/plan/schedule.h"
#include "tests/dist/plan/merge_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Instance {
  std::vector<LayerCost> layers;
  CostModel model;
};

// The least makespan over all groupings, by trying them all.
class BruteForce {
 public:
  explicit BruteForce(const Instance& instance) : count_(instance.layers.size()) {
    for (std::size_t begin = 0; begin < count_; ++begin) {
      double elements = 0, backward = 0;
      for (std::size_t end = begin + 1; end <= count_; ++end) {
        elements += instance.layers[end - 1].elements;
        backward += instance.layers[end - 1].backward;
        costs_[begin][end] = {backward + instance.model.sparsify(elements),
                              instance.model.communicate(elements)};
      }
    }
  }

  double least() { return least_from(0, 0, 0); }
  std::size_t tried() const { return tried_; }

 private:
  struct Cost {
    double compute, network;
  };

  double least_from(std::size_t begin, double t, double c) {
    if (begin == count_) {
      ++tried_;
      return c;
    }
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t end = begin + 1; end <= count_; ++end) {
      const Cost& cost = costs_[begin][end];
      const double encoded = t + cost.compute;
      least = std::min(least, least_from(end, encoded, std::max(c, encoded) + cost.network));
    }
    return least;
  }

  std::size_t count_, tried_ = 0;
  Cost costs_[14][15];
};

// The same for more layers: every pair (compute free, network free) that no other beats, without bounds.
double least_by_pairs(const Instance& instance) {
  const std::size_t count = instance.layers.size();
  std::vector<std::map<double, double>> pairs(count + 1);  // network by compute; falls as compute rises
  pairs[0][0] = 0;
  for (std::size_t end = 1; end <= count; ++end) {
    std::map<double, double>& here = pairs[end];
    double elements = 0, backward = 0;
    for (std::size_t begin = end; begin-- > 0;) {
      elements += instance.layers[begin].elements;
      backward += instance.layers[begin].backward;
      const double encode = backward + instance.model.sparsify(elements);
      const double send = instance.model.communicate(elements);
      for (const auto& [t, c] : pairs[begin]) {
        const double compute = t + encode, network = std::max(c, compute) + send;
        auto at = here.upper_bound(compute);
        if (at != here.begin() && std::prev(at)->second <= network) continue;
        at = here.lower_bound(compute);
        while (at != here.end() && at->second >= network) at = here.erase(at);
        here[compute] = network;
      }
    }
  }
  return pairs[count].rbegin()->second;
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : bits_(seed) {}
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  double scale(double low, double high) { return low * std::pow(high / low, uniform()); }
  int below(int n) { return static_cast<int>(uniform() * n); }

  // Sizes and times over several decades, some zero; selection that costs nothing, n, or n log n; start-ups
  // from nothing to far longer than backward.
  Instance instance(int layers) {
    Instance result;
    for (int i = 0; i < layers; ++i)
      result.layers.push_back(
          {below(8) == 0 ? 0 : std::floor(scale(1, 1e7)), below(8) == 0 ? 0 : scale(1e-5, 1e-2)});
    const int kind = below(3);
    const double selection = scale(1e-11, 1e-8);
    result.model.sparsify = [=](double n) {
      return kind == 0 || n < 2 ? 0 : selection * n * (kind == 1 ? 1 : std::log2(n));
    };
    const double alpha = below(6) == 0 ? 0 : scale(1e-6, 3e-2), beta = scale(1e-12, 1e-8);
    result.model.communicate = [=](double n) { return n > 0 ? alpha + beta * n : 0; };
    return result;
  }

 private:
  std::mt19937_64 bits_;
};

double makespan(const Instance& instance, const Sizes& plan) {
  return evaluate(instance.layers, plan, instance.model).makespan;
}

}  // namespace

TEST_CASE("the optimal plan of the fixture is the best of all 8192", "[merge]") {
  const std::map<int, double> golden = {{2, 0.102652}, {4, 0.104915}, {16, 0.131780}};
  for (const auto& [ranks, seconds] : golden) {
    INFO("ranks " << ranks);
    const Instance instance{merge_layers(), merge_model(ranks)};
    OptimalReport report;
    const Sizes plan = merge_optimal(instance.layers, instance.model, &report);
    CHECK(report.excess == 0);
    CHECK(makespan(instance, plan) == Approx(seconds).margin(5e-7));
    BruteForce brute(instance);
    CHECK(makespan(instance, plan) == Approx(brute.least()).epsilon(1e-12));
    CHECK(brute.tried() == 8192);
    if (ranks == 4) CHECK(plan == Sizes{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2});
  }
}

TEST_CASE("the optimal plan equals brute force on 1000 random instances", "[merge]") {
  Draw draw(2020);
  int merged = 0, apart = 0, between = 0;
  for (int i = 0; i < 1000; ++i) {
    const int count = i % 10 == 0 ? 14 : 1 + draw.below(12);
    const Instance instance = draw.instance(count);
    OptimalReport report;
    const Sizes plan = merge_optimal(instance.layers, instance.model, &report);
    INFO("instance " << i << ", " << count << " layers");
    REQUIRE(report.excess == 0);
    const double least = BruteForce(instance).least();
    REQUIRE(std::abs(makespan(instance, plan) - least) <= 1e-12 * least);
    if (count > 2) ++(plan.size() == 1 ? merged : plan.size() == instance.layers.size() ? apart : between);
  }
  // The instances are of all kinds.
  CHECK(merged > 50);
  CHECK(apart > 50);
  CHECK(between > 300);
}

TEST_CASE("the optimal plan of many layers beats every other one", "[merge]") {
  Draw draw(7);
  for (int i = 0; i < 60; ++i) {
    const Instance instance = draw.instance(30 + draw.below(31));
    OptimalReport report;
    const double best = makespan(instance, merge_optimal(instance.layers, instance.model, &report));
    INFO("instance " << i);
    CHECK(report.excess == 0);
    const double least = least_by_pairs(instance);
    CHECK(std::abs(best - least) <= 1e-12 * least);
    const double tolerance = 1e-12 * best;
    CHECK(best <= makespan(instance, no_merge(instance.layers.size())));
    CHECK(best <= makespan(instance, {instance.layers.size()}));
    CHECK(best <= makespan(instance, merge_omgs(instance.layers, instance.model)) + tolerance);
    const double alpha = instance.model.communicate(1);
    CHECK(best <=
          makespan(instance, merge_mgwfbp(instance.layers, alpha, instance.model.communicate)) + tolerance);
  }
}
