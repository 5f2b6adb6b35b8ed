#include <numeric>

#include "tests/support/variables.h"

using namespace topknot;

namespace {

// Registered: conv (6), bias (2), fc (4), beta (3); what is 1-D stays dense.
struct Store {
  Store() {
    const auto init = [](std::span<float> values, const CounterRng& rng) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = rng.normal(i);
    };
    conv = &store.add("conv", {1, 1, 2, 3}, init);
    bias = &store.add("bias", {2}, init);
    fc = &store.add("fc", {2, 2}, init);
    beta = &store.add("beta", {3}, init);
  }
  ParameterArena& build(std::uint64_t seed = 1) {
    return store.build([](const Parameter& p) { return p.shape().rank() > 1; }, seed);
  }
  ParameterStore store;
  Parameter *conv, *bias, *fc, *beta;
};

std::vector<std::string> names(std::span<Parameter* const> parameters) {
  std::vector<std::string> result;
  for (const Parameter* p : parameters) result.push_back(p->name());
  return result;
}

}  // namespace

TEST_CASE("the arena holds compressible parameters first, each part in reverse order of registration") {
  Store s;
  ParameterArena& arena = s.build();
  CHECK(names(arena.parameters()) == std::vector<std::string>{"fc", "conv", "beta", "bias"});
  CHECK(arena.size() == 15);
  CHECK(arena.compressible_size() == 10);
  CHECK(s.fc->offset() == 0);
  CHECK(s.conv->offset() == 4);
  CHECK(s.beta->offset() == 10);
  CHECK(s.bias->offset() == 13);
  CHECK(s.conv->compressible());
  CHECK_FALSE(s.beta->compressible());
  for (const Parameter* p : arena.parameters()) {
    CHECK(p->value() == arena.weights().data() + p->offset());
    CHECK(p->gradient() == arena.gradient(0, 15).data() + p->offset());
    CHECK(p->variable().value().data() == p->value());
    CHECK(p->variable().shape() == p->shape());
  }
  CHECK(&s.store.arena() == &arena);
  CHECK(s.store.parameters()[0]->name() == "conv");
}

TEST_CASE("parameters begin at 16 bytes, but for those behind one of an odd size, which are odd themselves") {
  ParameterStore store;
  const auto zero = [](std::span<float> values, const CounterRng&) { std::ranges::fill(values, 0.0f); };
  for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{{"conv", {8, 3, 3, 3}},
                                                                              {"gamma", {8}},
                                                                              {"odd", {3, 5}},
                                                                              {"second", {4, 8}},
                                                                              {"bias", {10}},
                                                                              {"beta", {8}}})
    store.add(name, shape, zero);
  ParameterArena& arena = store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  CHECK(names(arena.parameters()) ==
        std::vector<std::string>{"second", "conv", "odd", "beta", "gamma", "bias"});
  for (const Parameter* p : arena.parameters())
    if (p->compressible()) CHECK(p->offset() % 4 == 0);
}

TEST_CASE("an arena where all or none is compressible") {
  Store all, none;
  CHECK(all.store.build([](const Parameter&) { return true; }, 1).compressible_size() == 15);
  CHECK(none.store.build([](const Parameter&) { return false; }, 1).compressible_size() == 0);
  CHECK(names(none.store.arena().parameters()) == std::vector<std::string>{"fc", "beta", "bias", "conv"});
}

TEST_CASE("initial weights depend on the seed and the order of registration, not on the arena's order") {
  Store a, b, other, dense;
  a.build(7), b.build(7), other.build(8);
  dense.store.build([](const Parameter&) { return false; }, 7);
  const auto values = [](const Parameter* p) {
    return std::vector<float>(p->value(), p->value() + p->numel());
  };
  CHECK((values(a.conv) == values(b.conv)));
  CHECK((values(a.conv) == values(dense.conv)));
  CHECK((values(a.bias) == values(dense.bias)));
  CHECK((values(a.conv) != values(other.conv)));
  CHECK(values(a.conv)[0] != values(a.fc)[0]);  // streams of their own
}

TEST_CASE("gradient and residual slices swap their memory, each slice for itself, without a copy") {
  Store s;
  ParameterArena& arena = s.build();
  for (float r : arena.residual(0, 15)) CHECK(r == 0.0f);
  auto gradient = arena.gradient(0, 15), residual = arena.residual(0, 15);
  std::iota(gradient.begin(), gradient.end(), 1.0f);
  std::iota(residual.begin(), residual.end(), 101.0f);
  const float *first = gradient.data(), *second = residual.data();

  arena.swap_gradient_and_residual(4, 13);  // conv and beta
  CHECK(arena.gradient(4, 13).data() == second + 4);
  CHECK(arena.residual(4, 13).data() == first + 4);
  CHECK(arena.gradient(4, 13)[0] == 105.0f);
  CHECK(s.conv->gradient() == second + 4);
  CHECK(s.beta->gradient() == second + 10);
  CHECK(arena.gradient(0, 4).data() == first);  // the others stayed
  CHECK(s.bias->gradient() == first + 13);
  CHECK_THROWS_AS(arena.gradient(0, 10), Error);  // on different sides

  arena.swap_gradient_and_residual(4, 13);
  CHECK(arena.gradient(0, 15).data() == first);
}

TEST_CASE("backward writes where the gradient is after a swap, and leaves the residual alone") {
  Store s;
  ParameterArena& arena = s.build();
  arena.swap_gradient_and_residual(0, 4);
  for (float& r : arena.residual(0, 4)) r = 9.0f;
  backward(testing::weighted_sum(s.fc->variable(), {1, 2, 3, 4}));
  const auto gradient = arena.gradient(0, 4), residual = arena.residual(0, 4);
  CHECK((std::vector<float>(gradient.begin(), gradient.end()) == std::vector<float>{1, 2, 3, 4}));
  CHECK((std::vector<float>(residual.begin(), residual.end()) == std::vector<float>(4, 9.0f)));
}

TEST_CASE("slices must lie on parameter boundaries inside the arena") {
  Store s;
  ParameterArena& arena = s.build();
  for (const auto& [begin, end] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 3}, {1, 4}, {1, 10}, {0, 12}, {4, 11}, {5, 6}, {0, 16}, {16, 16}, {10, 4}}) {
    INFO(begin << " to " << end);
    CHECK_THROWS_AS(arena.gradient(begin, end), Error);
    CHECK_THROWS_AS(arena.residual(begin, end), Error);
    CHECK_THROWS_AS(arena.swap_gradient_and_residual(begin, end), Error);
  }
  for (const auto& [begin, end] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 4}, {4, 10}, {0, 10}, {10, 15}, {13, 15}, {0, 15}, {4, 4}}) {
    INFO(begin << " to " << end);
    CHECK(arena.gradient(begin, end).size() == end - begin);
  }
}

TEST_CASE("the checksum sees every bit and the order of the weights") {
  std::vector<float> w = testing::random_values(100, 1);
  const auto sum = parameter_checksum(w);
  CHECK(parameter_checksum(w) == sum);
  for (std::size_t i : {0, 1, 50, 99})
    for (int bit : {0, 8, 22, 23, 30, 31}) {
      auto changed = w;
      std::uint32_t word;
      std::memcpy(&word, &changed[i], 4);
      word ^= 1u << bit;
      std::memcpy(&changed[i], &word, 4);
      CHECK(parameter_checksum(changed) != sum);
    }
  auto swapped = w;
  std::swap(swapped[3], swapped[4]);
  CHECK(parameter_checksum(swapped) != sum);
  auto both = w;  // two sign bits flipped, which hashes that only carry upwards lose
  both[10] = -both[10], both[20] = -both[20];
  CHECK(parameter_checksum(both) != sum);
  CHECK(parameter_checksum(std::vector<float>{0.0f}) != parameter_checksum(std::vector<float>{-0.0f}));
  CHECK(parameter_checksum({}) != parameter_checksum(std::vector<float>{0.0f}));
}

TEST_CASE("a store rejects double names, late parameters and a second build") {
  Store s;
  const auto zero = [](std::span<float>, const CounterRng&) {};
  CHECK_THROWS_AS(s.store.add("conv", {1}, zero), Error);
  CHECK_THROWS_AS(s.store.arena(), Error);
  s.build();
  CHECK_THROWS_AS(s.store.add("late", {1}, zero), Error);
  CHECK_THROWS_AS(s.build(), Error);
}
