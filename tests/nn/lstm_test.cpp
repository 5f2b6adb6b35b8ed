// embedding and lstm against float64 loops, and the functions that their gates take.
#include "nn/ops/ops.h"

#include <cmath>
#include <limits>

#include "nn/core/simd.h"
#include "tests/support/error_text.h"
#include "tests/support/lstm_reference.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::LstmCase;

namespace {

// Of random values; weights of a size that leaves the gates in their curved part.
struct LstmSetUp {
  LstmCase c;
  Leaf x, input, recurrent, input_bias, recurrent_bias;
  Buffer hidden, cell;

  static std::vector<float> scaled(std::int64_t n, std::uint32_t stream, double by) {
    std::vector<float> values = random_values(n, stream);
    for (float& v : values) v *= static_cast<float>(by);
    return values;
  }
  explicit LstmSetUp(const LstmCase& size, std::int64_t spare_rows = 0)
      : c(size),
        x({c.steps * c.batch, c.in}, random_values(c.steps * c.batch * c.in, 1)),
        input({4 * c.width, c.in}, scaled(4 * c.width * c.in, 2, 1 / std::sqrt(c.in))),
        recurrent({4 * c.width, c.width}, scaled(4 * c.width * c.width, 3, 1 / std::sqrt(c.width))),
        input_bias({4 * c.width}, random_values(4 * c.width, 4)),
        recurrent_bias({4 * c.width}, random_values(4 * c.width, 5)),
        hidden{"hidden", scaled((c.batch + spare_rows) * c.width, 6, 0.3)},
        cell{"cell", random_values((c.batch + spare_rows) * c.width, 7)} {}

  Variable run() {
    return lstm(x.variable(), c.batch,
                {input.variable(), recurrent.variable(), input_bias.variable(), recurrent_bias.variable()},
                {&hidden, &cell});
  }
  std::vector<float> state_of(const Buffer& buffer) const {
    return {buffer.values.begin(), buffer.values.begin() + c.batch * c.width};
  }
  reference::LstmValues values() const {
    const auto of = [](const Leaf& leaf) { return as_double(values_of(leaf.variable())); };
    return {of(x),
            of(input),
            of(recurrent),
            of(input_bias),
            of(recurrent_bias),
            as_double(state_of(hidden)),
            as_double(state_of(cell))};
  }
};

void check_near(const std::string& what, const std::vector<float>& actual, const Array& expected,
                double tolerance) {
  double largest = 1e-3;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  check_close(what, actual, expected, Array(expected.size(), largest), tolerance);
}

}  // namespace

TEST_CASE("lstm agrees with the formula, forward and backward, for odd sizes and any number of threads") {
  for (const int threads : {1, 2, 3})
    for (const LstmCase& c : {LstmCase{1, 1, 1, 1},
                              {1, 3, 2, 5},
                              {3, 4, 7, 17},
                              {5, 2, 16, 16},
                              {2, 9, 33, 50},
                              {20, 5, 40, 64}}) {
      INFO(c.steps << " steps of " << c.batch << ", " << c.in << " -> " << c.width << ", " << threads
                   << " threads");
      const Threads use(threads);
      LstmSetUp set_up(c, 2);
      const auto dy = random_values(c.steps * c.batch * c.width, 8);
      const reference::LstmResult expected = reference::lstm(c, set_up.values(), as_double(dy));
      const std::vector<float> spare(set_up.hidden.values.begin() + c.batch * c.width,
                                     set_up.hidden.values.end());
      const Variable y = set_up.run();
      REQUIRE(y.shape() == Shape({c.steps * c.batch, c.width}));
      check_near("y", values_of(y), expected.y, 2e-6);
      check_near("hidden", set_up.state_of(set_up.hidden), expected.hidden, 2e-6);
      check_near("cell", set_up.state_of(set_up.cell), expected.cell, 2e-6);
      CHECK(std::equal(spare.begin(), spare.end(), set_up.hidden.values.begin() + c.batch * c.width));
      backward(weighted_sum(y, dy));
      check_near("dx", set_up.x.gradient(), expected.dx, 1e-5);
      check_near("dW_ih", set_up.input.gradient(), expected.dinput, 1e-5);
      check_near("dW_hh", set_up.recurrent.gradient(), expected.drecurrent, 1e-5);
      check_near("db_ih", set_up.input_bias.gradient(), expected.dbias, 1e-5);
      check_near("db_hh", set_up.recurrent_bias.gradient(), expected.dbias, 1e-5);
    }
}

TEST_CASE("the float64 gradient of lstm is the loss's slope by finite differences") {
  const LstmCase c{2, 3, 3, 4};
  const LstmSetUp set_up(c);
  reference::LstmValues v = set_up.values();
  const Array dy = as_double(random_values(c.steps * c.batch * c.width, 8));
  const auto loss = [&] {
    const Array y = reference::lstm(c, v, dy).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  const reference::LstmResult r = reference::lstm(c, v, dy);
  const auto check = [&](const char* what, Array& values, const Array& gradient) {
    INFO(what);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = values[i], h = 1e-5;
      values[i] = value + h;
      const double above = loss();
      values[i] = value - h;
      const double below = loss();
      values[i] = value;
      CHECK((above - below) / (2 * h) == Approx(gradient[i]).margin(1e-8).epsilon(1e-6));
    }
  };
  check("x", v.x, r.dx);
  check("input", v.input, r.dinput);
  check("recurrent", v.recurrent, r.drecurrent);
  check("input_bias", v.input_bias, r.dbias);
  check("recurrent_bias", v.recurrent_bias, r.dbias);
}

TEST_CASE("lstm carries its state: two windows are one of both, with the gradient cut between them") {
  const LstmCase whole{3, 6, 5, 20}, half{3, 3, 5, 20};
  LstmSetUp together(whole), apart(half);
  const auto xs = random_values(6 * 3 * 5, 1);
  const std::vector<float> y = values_of(together.run());
  const auto window = [&](std::ptrdiff_t from) {
    std::copy_n(xs.begin() + from, apart.x.parameter().numel(), apart.x.parameter().value());
    return apart.run();
  };
  std::vector<float> joined = values_of(window(0));
  const Variable second = window(static_cast<std::ptrdiff_t>(apart.x.parameter().numel()));
  const auto rest = values_of(second);
  joined.insert(joined.end(), rest.begin(), rest.end());
  check_near("y", joined, as_double(y), 1e-6);
  check_near("hidden", apart.hidden.values, as_double(together.hidden.values), 1e-6);
  check_near("cell", apart.cell.values, as_double(together.cell.values), 1e-6);
  // From a state of zeros the second window gives something else.
  LstmSetUp reset(half);
  std::copy(xs.begin() + 45, xs.end(), reset.x.parameter().value());
  std::fill(reset.hidden.values.begin(), reset.hidden.values.end(), 0.0f);
  std::fill(reset.cell.values.begin(), reset.cell.values.end(), 0.0f);
  CHECK(values_of(reset.run()) != rest);
}

TEST_CASE("lstm without a state begins every batch with zeros") {
  LstmSetUp set_up({3, 4, 5, 20});
  const LstmWeights weights{set_up.input.variable(), set_up.recurrent.variable(),
                            set_up.input_bias.variable(), set_up.recurrent_bias.variable()};
  const auto without = values_of(lstm(set_up.x.variable(), 3, weights, {}));
  CHECK(values_of(lstm(set_up.x.variable(), 3, weights, {})) == without);
  CHECK(values_of(set_up.run()) != without);
  for (Buffer* state : {&set_up.hidden, &set_up.cell})
    std::fill(state->values.begin(), state->values.end(), 0.0f);
  CHECK(values_of(set_up.run()) == without);
  CHECK_THROWS_AS(lstm(set_up.x.variable(), 3, weights, {&set_up.hidden, nullptr}), Error);
}

TEST_CASE(
    "lstm gives the same for any number of threads within rounding, and the same bits again for one number") {
  const auto result = [](int threads) {
    const Threads use(threads);
    LstmSetUp set_up({20, 7, 24, 40});
    const Variable y = set_up.run();
    const auto values = values_of(y);
    backward(weighted_sum(y, random_values(20 * 7 * 40, 8)));
    return std::pair(values, set_up.recurrent.gradient());
  };
  const auto [y, dw] = result(1);
  for (const int threads : {2, 3}) {
    const auto [other_y, other_dw] = result(threads);
    check_close("y", other_y, as_double(y), Array(y.size(), 1.0), 1e-6);
    check_near("dW_hh", other_dw, as_double(dw), 1e-5);
  }
  CHECK(result(2) == result(2));
}

TEST_CASE("lstm: a NaN comes through, and shapes that do not fit are refused") {
  LstmSetUp set_up({2, 3, 4, 18});
  set_up.x.parameter().value()[4] = std::numeric_limits<float>::quiet_NaN();  // sequence 1, step 0
  const auto y = values_of(set_up.run());
  CHECK(std::isnan(y[18]));
  CHECK(std::isfinite(y[0]));
  CHECK(std::isnan(y[y.size() - 1]));
  LstmSetUp other({2, 3, 4, 18});
  const LstmWeights weights{other.input.variable(), other.recurrent.variable(), other.input_bias.variable(),
                            other.recurrent_bias.variable()};
  CHECK_THROWS_AS(lstm(other.x.variable(), 4, weights, {&other.hidden, &other.cell}), Error);
  CHECK_THROWS_AS(lstm(other.x.variable(), 3, weights, {&other.hidden, &other.cell}), Error);
  CHECK_THROWS_AS(lstm(other.x.variable(), 2,
                       {weights.recurrent, weights.recurrent, weights.input_bias, weights.recurrent_bias},
                       {&other.hidden, &other.cell}),
                  Error);
}

TEST_CASE("embedding takes a row per token, step by step, and adds up the gradients of equal tokens") {
  const std::int64_t batch = 3, steps = 4, tokens = 7, width = 5;
  const std::vector<float> ids{0, 6, 6, 2, 1, 6, 0, 0, 3, 3, 3, 3};
  const Variable input(Tensor::from(ids, {batch, steps, 1, 1}));
  const auto table = random_values(tokens * width, 1), dy = random_values(steps * batch * width, 2);
  for (const int threads : {1, 3}) {
    const Threads use(threads);
    Leaf weight({tokens, width}, table);
    for (int pass = 0; pass < 2; ++pass) {  // the second overwrites the first
      weight.clear();
      const Variable y = embedding(input, weight.variable());
      REQUIRE(y.shape() == Shape({steps * batch, width}));
      std::vector<float> expected, gradient(table.size(), 0.0f);
      for (std::int64_t r = 0; r < steps * batch; ++r)
        for (std::int64_t j = 0; j < width; ++j) {
          const auto id =
              static_cast<std::int64_t>(ids[static_cast<std::size_t>(r % batch * steps + r / batch)]);
          const auto from = static_cast<std::size_t>(id * width + j);
          expected.push_back(table[from]);
          gradient[from] += dy[static_cast<std::size_t>(r * width + j)];
        }
      CHECK(values_of(y) == expected);
      backward(weighted_sum(y, dy));
      CHECK(weight.gradient() == gradient);
    }
  }
  Leaf weight({tokens, width}, table);
  backward(weighted_sum(add(embedding(input, weight.variable()), embedding(input, weight.variable())), dy));
  Leaf once({tokens, width}, table);
  backward(weighted_sum(embedding(input, once.variable()), dy));
  for (std::size_t i = 0; i < table.size(); ++i)
    CHECK(weight.gradient()[i] == Approx(2 * once.gradient()[i]));
  for (const float bad : {7.0f, -1.0f})
    CHECK(says(error_text([&] {
                 embedding(Variable(Tensor::from({bad}, {1, 1, 1, 1})), weight.variable());
               }),
               {"of 7 tokens"}));
}

TEST_CASE("exp, the logistic function and tanh of lanes are those of the standard library") {
  std::vector<float> xs{0.0f, -0.0f, 0.625f, -0.625f, 87.0f, -87.0f, 1e-20f, 30.0f};
  for (int i = -4000; i <= 4000; ++i) xs.push_back(static_cast<float>(i) * 0.02f + 1e-4f);
  xs.resize(xs.size() / kLanes * kLanes);
  std::vector<float> e(xs.size()), s(xs.size()), t(xs.size());
  for (std::size_t i = 0; i < xs.size(); i += kLanes) {
    store(&e[i], exp_lanes(load(&xs[i])));
    store(&s[i], sigmoid_lanes(load(&xs[i])));
    store(&t[i], tanh_lanes(load(&xs[i])));
  }
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const double x = xs[i];
    INFO("x " << x);
    CHECK(std::abs(e[i] - std::exp(x)) <= 2e-7 * std::exp(x));
    CHECK(std::abs(s[i] - reference::logistic(x)) <= 2e-7);
    CHECK(std::abs(t[i] - std::tanh(x)) <= 4e-7 * std::abs(std::tanh(x)));
  }
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  float ends[kLanes] = {nan, infinity, -infinity, 1000.0f, -1000.0f};
  const auto lane = [&](Lanes v, int i) { return v[i]; };
  for (const Lanes v : {exp_lanes(load(ends)), sigmoid_lanes(load(ends)), tanh_lanes(load(ends))}) {
    CHECK(std::isnan(lane(v, 0)));
    for (int i = 1; i < 5; ++i) CHECK_FALSE(std::isnan(lane(v, i)));
  }
  CHECK(lane(tanh_lanes(load(ends)), 2) == -1.0f);
  CHECK(lane(sigmoid_lanes(load(ends)), 1) == 1.0f);
}
