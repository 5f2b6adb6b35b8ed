#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions seeded(std::uint64_t seed, bool shared = false) {
  CompressOptions options;
  options.seed = seed;
  options.set("shared_seed", shared);
  return options;
}

double energy(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += double(v) * double(v);
  return sum;
}

}  // namespace

TEST_CASE("randk leaves 1 - k/d of the energy, in the mean of 400 draws") {
  const std::size_t d = GENERATE(50u, 5000u, 50000u);
  const double density = d == 50000 ? 0.0005 : 0.1;
  const std::vector<float> x = noise(d, 1, 2);
  const auto selector = make_selector("randk", seeded(3));
  const int draws = 400;
  double mean = 0, squares = 0, k = 0;
  for (int t = 0; t < draws; ++t) {
    const auto selected = select_from_copy(*selector, x, {density, t});
    REQUIRE(well_formed(selected, x));
    k = double(selected.indices.size());
    const double left = 1 - energy(selected.values) / energy(x);
    mean += left / draws;
    squares += left * left / draws;
  }
  CHECK(k == double(target_count(density, d)));
  const double error = std::sqrt((squares - mean * mean) / (draws - 1));
  CHECK(std::abs(mean - (1 - k / double(d))) < 3 * error);
}

TEST_CASE("randk draws every subset with the same probability") {
  // 2 of 5: ten subsets; chi-square with 9 degrees of freedom is below 27.88 with probability 0.999.
  const auto selector = make_selector("randk", seeded(8));
  const std::vector<float> x = {1, 2, 3, 4, 5};
  std::vector<int> counts(32);
  const int draws = 4000;
  for (int t = 0; t < draws; ++t) {
    const auto selected = select_from_copy(*selector, x, {0.4, t});
    REQUIRE(selected.indices.size() == 2);
    ++counts[(1u << selected.indices[0]) + (1u << selected.indices[1])];
  }
  double chi_square = 0;
  int subsets = 0;
  for (const int count : counts) {
    if (count == 0) continue;
    ++subsets;
    chi_square += (count - draws / 10.0) * (count - draws / 10.0) / (draws / 10.0);
  }
  CHECK(subsets == 10);
  CHECK(chi_square < 27.88);
}

TEST_CASE("randk draws anew for each step, rank, range and seed, and the same where they are the same") {
  const std::vector<float> x = noise(10000, 2);
  const auto selector = make_selector("randk", seeded(1)), again = make_selector("randk", seeded(1)),
             other = make_selector("randk", seeded(2));
  const auto draw = [&](Selector& from, Asked asked) { return select_from_copy(from, x, asked).indices; };
  const auto base = draw(*selector, {0.01, 5, 1, 700});
  CHECK(base.size() == 100);
  CHECK(draw(*again, {0.01, 5, 1, 700}) == base);
  CHECK(draw(*selector, {0.01, 6, 1, 700}) != base);
  CHECK(draw(*selector, {0.01, 5, 2, 700}) != base);
  CHECK(draw(*selector, {0.01, 5, 1, 10700}) != base);
  CHECK(draw(*other, {0.01, 5, 1, 700}) != base);
  CHECK(draw(*selector, {0.01, 5, 1, 700}) == base);
}

TEST_CASE("with a shared seed all ranks draw the same positions, and other ones at the next step") {
  const std::vector<float> x = noise(10000, 3);
  const auto a = make_selector("randk", seeded(1, true)), b = make_selector("randk", seeded(1, true));
  const auto first = select_from_copy(*a, x, {0.01, 4, 0}).indices;
  CHECK(select_from_copy(*b, x, {0.01, 4, 3}).indices == first);
  CHECK(select_from_copy(*b, x, {0.01, 5, 3}).indices != first);
}

TEST_CASE("groups draw their own positions") {
  GroupSpec spec = whole_group(5000, 1);
  std::vector<std::vector<std::byte>> blocks;
  for (const std::size_t offset : {0u, 5000u}) {
    spec.offset = offset;
    SimulatedRanks ranks(named("randk"), spec);
    ranks[0].gradient = noise(5000, 1);
    REQUIRE(ranks.step(0, 0.01));
    blocks.push_back(ranks.blocks()[0]);
  }
  CHECK(blocks[0] != blocks[1]);
}
