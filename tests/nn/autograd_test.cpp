#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Weights {2, 2} under the given names in one arena.
struct Weights {
  explicit Weights(const std::vector<std::string>& names) {
    for (const auto& name : names)
      all.push_back(&store.add(name, {2, 2}, [](std::span<float> values, const CounterRng& rng) {
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = rng.normal(i);
      }));
    arena = &store.build([](const Parameter&) { return true; }, 3);
  }
  const Variable& operator[](std::size_t i) const { return all[i]->variable(); }
  std::vector<float> gradient(std::size_t i) const { return {all[i]->gradient(), all[i]->gradient() + 4}; }
  ParameterStore store;
  std::vector<Parameter*> all;
  ParameterArena* arena;
};

Variable input(std::uint32_t stream = 1) {
  return Variable(Tensor::from(random_values(4, stream), {2, 2}));
}
const std::vector<float> kOnes(4, 1.0f);

std::vector<std::string> hook_order(const Variable& loss) {
  std::vector<std::string> names;
  backward(loss, [&](Parameter& parameter) { names.push_back(parameter.name()); });
  return names;
}

}  // namespace

TEST_CASE("hooks fire once for each parameter, the last layer's first") {
  Weights w({"a", "b", "c"});
  Variable y = input();
  for (std::size_t i = 0; i < 3; ++i) y = relu(linear(y, w[i], {}));
  CHECK(hook_order(weighted_sum(y, kOnes)) == std::vector<std::string>{"c", "b", "a"});
}

TEST_CASE("a hook of a shared parameter fires once, after its last contribution") {
  Weights w({"shared", "middle", "unused"});
  const Variable y = linear(linear(linear(input(), w[0], {}), w[1], {}), w[0], {});
  std::vector<std::string> names;
  std::vector<float> seen;
  backward(weighted_sum(y, kOnes), [&](Parameter& parameter) {
    names.push_back(parameter.name());
    if (parameter.name() == "shared") seen = w.gradient(0);
  });
  CHECK(names == std::vector<std::string>{"middle", "shared"});
  CHECK((seen == w.gradient(0)));
}

TEST_CASE("a hook sees the final gradient, also where two branches meet in a parameter") {
  Weights w({"shared", "left"});
  const Variable left = linear(linear(input(1), w[1], {}), w[0], {}), right = linear(input(2), w[0], {});
  std::vector<std::vector<float>> seen(2);
  std::vector<std::string> names;
  backward(weighted_sum(add(left, right), kOnes), [&](Parameter& parameter) {
    names.push_back(parameter.name());
    seen[parameter.name() == "left"] = {parameter.gradient(), parameter.gradient() + 4};
  });
  CHECK(names.size() == 2);
  CHECK((seen[0] == w.gradient(0)));
  CHECK((seen[1] == w.gradient(1)));
}

TEST_CASE("a parameter used twice by one op fires once, with both contributions") {
  Weights w({"a"});
  CHECK(hook_order(weighted_sum(add(w[0], w[0]), kOnes)) == std::vector<std::string>{"a"});
  CHECK((w.gradient(0) == std::vector<float>(4, 2.0f)));
}

TEST_CASE("without a hook nothing is called, and gradients are the same") {
  Weights w({"a", "b"});
  const auto loss = [&] { return weighted_sum(linear(linear(input(), w[0], {}), w[1], {}), kOnes); };
  backward(loss());
  const auto first = w.gradient(0), second = w.gradient(1);
  w.arena->mark_gradients_unwritten();
  CHECK(hook_order(loss()).size() == 2);
  CHECK((w.gradient(0) == first));
  CHECK((w.gradient(1) == second));
}

TEST_CASE("gradients of micro-batches add up to the gradient of the whole batch") {
  const std::int64_t n = 12, in = 7, out = 3;
  const auto x = random_values(n * in, 1), target = random_values(n * out, 2);
  Leaf w({out, in}, random_values(out * in, 3)), b({out}, random_values(out, 4));
  int fired = 0;
  const auto pass = [&](std::int64_t begin, std::int64_t end, const GradientHook& hook) {
    const auto slice = [&](const std::vector<float>& v, std::int64_t width) {
      return Tensor::from({v.begin() + begin * width, v.begin() + end * width}, {end - begin, width});
    };
    const Variable y = linear(Variable(slice(x, in)), w.variable(), b.variable());
    backward(mean_squared_error(y, slice(target, out)), hook);
  };
  const GradientHook count = [&](Parameter&) { ++fired; };
  pass(0, n, {});
  const auto whole_w = w.gradient(), whole_b = b.gradient();
  w.clear(), b.clear();
  for (int part = 0; part < 4; ++part) pass(3 * part, 3 * part + 3, part == 3 ? count : GradientHook());
  CHECK(fired == 2);
  // The mean over the batch is the mean of the micro-batches' means.
  auto mean_w = w.gradient(), mean_b = b.gradient();
  for (auto* mean : {&mean_w, &mean_b})
    for (float& v : *mean) v /= 4;
  check_close("dw", mean_w, as_double(whole_w), Array(whole_w.size(), 1.0), 1e-6);
  check_close("db", mean_b, as_double(whole_b), Array(whole_b.size(), 1.0), 1e-6);
}

TEST_CASE("zero_unwritten_gradients zeroes and names what no backward pass has written since the marking") {
  Weights w({"a", "b"});
  backward(weighted_sum(add(linear(input(), w[0], {}), linear(input(), w[1], {})), kOnes));
  CHECK(w.arena->zero_unwritten_gradients().empty());
  w.arena->mark_gradients_unwritten();
  backward(weighted_sum(linear(input(), w[0], {}), kOnes));
  const auto kept = w.gradient(0);
  const auto unwritten = w.arena->zero_unwritten_gradients();
  REQUIRE(unwritten.size() == 1);
  CHECK(unwritten[0] == w.all[1]);
  CHECK((w.gradient(0) == kept));
  CHECK((w.gradient(1) == std::vector<float>(4, 0.0f)));
}

TEST_CASE("backward frees the graph as it goes, and what the ops kept") {
  Weights w({"a"});
  const auto kept = std::make_shared<int>(1);
  const Variable y = linear(input(), w[0], {});
  const Variable z("keeper", y.value(), {y}, [y, kept](Tensor grad) { y.accumulate_grad(std::move(grad)); });
  const Variable loss = weighted_sum(z, kOnes);
  CHECK(kept.use_count() == 2);
  backward(loss);
  CHECK(kept.use_count() == 1);
}

TEST_CASE("a graph that is never walked is freed with its last variable") {
  const auto kept = std::make_shared<int>(1);
  {
    Weights w({"a"});
    const Variable y = linear(input(), w[0], {});
    const Variable z("keeper", y.value(), {y}, [y, kept](Tensor) {});
    CHECK(kept.use_count() == 2);
  }
  CHECK(kept.use_count() == 1);
}

TEST_CASE("a deep graph is walked and freed without deep recursion in the walk") {
  Weights w({"a"});
  Variable y = linear(input(), w[0], {});
  for (int i = 0; i < 20000; ++i) y = relu(y);
  const Variable loss = weighted_sum(y, kOnes);
  y = {};
  CHECK(hook_order(loss) == std::vector<std::string>{"a"});
}

TEST_CASE("nothing is recorded for constants, and backward from a constant does nothing") {
  const Variable y = relu(input());
  CHECK_FALSE(y.requires_grad());
  const auto kept = std::make_shared<int>(1);
  {
    const Variable z("keeper", y.value(), {y}, [kept](Tensor) {});
    CHECK(kept.use_count() == 1);
  }
  CHECK_NOTHROW(backward(weighted_sum(y, kOnes)));
}

TEST_CASE("backward rejects a loss that is not one element; an op, a gradient of another shape") {
  Weights w({"a"});
  CHECK_THROWS_AS(backward(w[0]), Error);
  CHECK_THROWS_AS(w[0].accumulate_grad(Tensor::zeros({4})), Error);
}

TEST_CASE("a diamond of many paths costs one visit a node: gradient 2^30 after 30 doublings") {
  Weights w({"a"});
  Variable y = w[0];
  for (int i = 0; i < 30; ++i) y = add(y, y);
  CHECK(hook_order(weighted_sum(y, kOnes)) == std::vector<std::string>{"a"});
  CHECK((w.gradient(0) == std::vector<float>(4, 0x1p30f)));
}
