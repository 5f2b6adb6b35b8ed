// embedding and lstm against float64 loops, and the functions that their gates take.
#include "nn/core/simd.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::logistic;

namespace {

// The layer in float64, loop by loop from the formula of nn/ops/ops.h, and its gradient by back-propagation
// through the steps.

struct LstmCase {
  std::int64_t batch, steps, in, width;
  std::size_t at(std::int64_t s, std::int64_t b, std::int64_t j, std::int64_t columns) const {
    return std::size_t((s * batch + b) * columns + j);
  }
};

struct LstmValues {
  Array x, input, recurrent, input_bias, recurrent_bias, hidden,
      cell;  // hidden, cell: the state, [batch, width]
};

struct LstmResult {
  Array y, hidden, cell;                // the value, and the state after it
  Array dx, dinput, drecurrent, dbias;  // dbias: of both biases
};

// `dy`: of the value.
LstmResult lstm_in_double(const LstmCase& c, const LstmValues& v, const Array& dy) {
  const std::int64_t H = c.width, G = 4 * H;
  LstmResult r;
  r.y.resize(dy.size());
  Array gates(std::size_t(c.steps * c.batch * G)), cells(dy.size()), before_h = v.hidden, before_c = v.cell;
  const auto index = [](std::int64_t i) { return std::size_t(i); };
  for (std::int64_t s = 0; s < c.steps; ++s) {
    Array h(before_h.size()), cell(before_c.size());
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t g = 0; g < G; ++g) {
        double sum = v.input_bias[index(g)] + v.recurrent_bias[index(g)];
        for (std::int64_t k = 0; k < c.in; ++k)
          sum += v.x[c.at(s, b, k, c.in)] * v.input[index(g * c.in + k)];
        for (std::int64_t k = 0; k < H; ++k)
          sum += before_h[index(b * H + k)] * v.recurrent[index(g * H + k)];
        gates[c.at(s, b, g, G)] = g / H == 2 ? std::tanh(sum) : logistic(sum);
      }
      for (std::int64_t j = 0; j < H; ++j) {
        const auto gate = [&](std::int64_t k) { return gates[c.at(s, b, k * H + j, G)]; };
        const double value = gate(1) * before_c[index(b * H + j)] + gate(0) * gate(2);
        cells[c.at(s, b, j, H)] = cell[index(b * H + j)] = value;
        r.y[c.at(s, b, j, H)] = h[index(b * H + j)] = gate(3) * std::tanh(value);
      }
    }
    before_h = h, before_c = cell;
  }
  r.hidden = before_h, r.cell = before_c;

  r.dx.assign(v.x.size(), 0), r.dinput.assign(v.input.size(), 0), r.drecurrent.assign(v.recurrent.size(), 0);
  r.dbias.assign(v.input_bias.size(), 0);
  Array later_h(before_h.size(), 0), later_c(before_c.size(), 0);
  for (std::int64_t s = c.steps - 1; s >= 0; --s) {
    Array dh_before(later_h.size(), 0);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      Array da(index(G));
      for (std::int64_t j = 0; j < H; ++j) {
        const auto gate = [&](std::int64_t k) { return gates[c.at(s, b, k * H + j, G)]; };
        const double i = gate(0), f = gate(1), g = gate(2), o = gate(3),
                     t = std::tanh(cells[c.at(s, b, j, H)]);
        const double c_before = s > 0 ? cells[c.at(s - 1, b, j, H)] : v.cell[index(b * H + j)];
        const double dh = dy[c.at(s, b, j, H)] + later_h[index(b * H + j)];
        const double dc = later_c[index(b * H + j)] + dh * o * (1 - t * t);
        da[index(j)] = dc * g * i * (1 - i), da[index(H + j)] = dc * c_before * f * (1 - f);
        da[index(2 * H + j)] = dc * i * (1 - g * g), da[index(3 * H + j)] = dh * t * o * (1 - o);
        later_c[index(b * H + j)] = dc * f;
      }
      for (std::int64_t g = 0; g < G; ++g) {
        const double d = da[index(g)];
        r.dbias[index(g)] += d;
        for (std::int64_t k = 0; k < c.in; ++k) {
          r.dinput[index(g * c.in + k)] += d * v.x[c.at(s, b, k, c.in)];
          r.dx[c.at(s, b, k, c.in)] += d * v.input[index(g * c.in + k)];
        }
        for (std::int64_t k = 0; k < H; ++k) {
          r.drecurrent[index(g * H + k)] +=
              d * (s > 0 ? r.y[c.at(s - 1, b, k, H)] : v.hidden[index(b * H + k)]);
          dh_before[index(b * H + k)] += d * v.recurrent[index(g * H + k)];
        }
      }
    }
    later_h = dh_before;
  }
  return r;
}

// Of random values; weights of a size that leaves the gates in their curved part.
struct LstmSetUp {
  LstmCase c;
  Leaf x, input, recurrent, input_bias, recurrent_bias;
  ParameterStore states;
  Buffer &hidden, &cell;

  static std::vector<float> scaled(std::int64_t n, std::uint32_t stream, double by) {
    std::vector<float> values = random_values(n, stream);
    for (float& v : values) v *= float(by);
    return values;
  }
  explicit LstmSetUp(const LstmCase& size, std::int64_t spare_rows = 0)
      : c(size),
        x({c.steps * c.batch, c.in}, random_activations(c.steps * c.batch * c.in, 1)),
        input({4 * c.width, c.in}, scaled(4 * c.width * c.in, 2, 1 / std::sqrt(c.in))),
        recurrent({4 * c.width, c.width}, scaled(4 * c.width * c.width, 3, 1 / std::sqrt(c.width))),
        input_bias({4 * c.width}, random_values(4 * c.width, 4)),
        recurrent_bias({4 * c.width}, random_values(4 * c.width, 5)),
        states(test_device()),
        hidden(states.add_state("hidden", std::size_t((c.batch + spare_rows) * c.width))),
        cell(states.add_state("cell", hidden.values.size())) {
    states.add("unused", {1}, [](std::span<float> values, const CounterRng&) { values[0] = 0; });
    states.build([](const Parameter&) { return true; }, 1);
    set_state(rounded_to(activation_type(), scaled((c.batch + spare_rows) * c.width, 6, 0.3)),
              random_values((c.batch + spare_rows) * c.width, 7));
  }

  void set_state(const std::vector<float>& of_hidden, const std::vector<float>& of_cell) {
    hidden.values = of_hidden, cell.values = of_cell;
    states.statistics_to_device();
  }
  LstmWeights weights() const {
    return {input.variable(), recurrent.variable(), input_bias.variable(), recurrent_bias.variable()};
  }
  // The state after it is in `hidden` and `cell`.
  Variable run() {
    const Variable y = lstm(activation(x.variable()), c.batch, weights(), {&hidden, &cell});
    states.statistics_to_host();
    return y;
  }
  std::vector<float> state_of(const Buffer& buffer) const {
    return {buffer.values.begin(), buffer.values.begin() + c.batch * c.width};
  }
  LstmValues values() const {
    const auto of = [](const Leaf& leaf) { return as_double(values_of(leaf.variable())); };
    const auto rounded = [](const Leaf& leaf) {
      return as_double(rounded_to(activation_type(), values_of(leaf.variable())));
    };
    return {of(x),
            rounded(input),
            rounded(recurrent),
            of(input_bias),
            of(recurrent_bias),
            as_double(state_of(hidden)),
            as_double(state_of(cell))};
  }
};

void check_to_largest(const std::string& what, const std::vector<float>& actual, const Array& expected,
                      double tolerance) {
  double largest = 1e-3;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  check_close(what, actual, expected, Array(expected.size(), largest), tolerance);
}

}  // namespace

TEST_CASE("lstm agrees with the formula, forward and backward, for odd sizes and any number of threads") {
  // In bfloat16 gates, cells and the gradients of weights stay in fp32.
  const OnDevice device(GENERATE(from_range(activation_types())));
  const bool bf16 = activation_type() == DType::bf16;
  const double of_values = bf16       ? 0.02
                           : on_gpu() ? 2e-5
                                      : 2e-6,
               of_gradients = bf16       ? 0.02
                              : on_gpu() ? 2e-5
                                         : 1e-5;
  for (const int threads : on_gpu() ? std::vector{1} : std::vector{1, 2, 3})
    for (const LstmCase& c : {LstmCase{1, 1, 1, 1},
                              {1, 3, 2, 5},
                              {3, 4, 7, 17},
                              {5, 2, 16, 16},
                              {2, 9, 33, 50},
                              {20, 5, 40, 64}}) {
      INFO(c.steps << " steps of " << c.batch << ", " << c.in << " -> " << c.width << ", " << threads
                   << " threads");
      const Threads use(threads);
      LstmSetUp set_up(c, on_gpu() ? 0 : 2);
      const auto dy = random_activations(c.steps * c.batch * c.width, 8);
      const LstmResult expected = lstm_in_double(c, set_up.values(), as_double(dy));
      const auto hidden = set_up.hidden.values, cell = set_up.cell.values;
      const std::vector<float> spare(hidden.begin() + c.batch * c.width, hidden.end());
      for (int pass = 0; pass < 2; ++pass) {  // the second overwrites the first's gradients
        set_up.set_state(hidden, cell);
        for (const Leaf* leaf :
             {&set_up.x, &set_up.input, &set_up.recurrent, &set_up.input_bias, &set_up.recurrent_bias})
          leaf->clear();
        const Variable y = set_up.run();
        REQUIRE(y.shape() == Shape({c.steps * c.batch, c.width}));
        check_to_largest("y", values_of(y), expected.y, of_values);
        backward(weighted_sum(y, dy));
      }
      check_to_largest("hidden", set_up.state_of(set_up.hidden), expected.hidden, of_values);
      check_to_largest("cell", set_up.state_of(set_up.cell), expected.cell, of_values);
      CHECK(std::equal(spare.begin(), spare.end(), set_up.hidden.values.begin() + c.batch * c.width));
      check_to_largest("dx", set_up.x.gradient(), expected.dx, of_gradients);
      check_to_largest("dW_ih", set_up.input.gradient(), expected.dinput, of_gradients);
      check_to_largest("dW_hh", set_up.recurrent.gradient(), expected.drecurrent, of_gradients);
      check_to_largest("db_ih", set_up.input_bias.gradient(), expected.dbias, of_gradients);
      check_to_largest("db_hh", set_up.recurrent_bias.gradient(), expected.dbias, of_gradients);
    }
}

TEST_CASE("the float64 gradient of lstm is the loss's slope by finite differences") {
  const LstmCase c{2, 3, 3, 4};
  const LstmSetUp set_up(c);
  LstmValues v = set_up.values();
  const Array dy = as_double(random_values(c.steps * c.batch * c.width, 8));
  const auto loss = [&] {
    const Array y = lstm_in_double(c, v, dy).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  const LstmResult r = lstm_in_double(c, v, dy);
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
  const Variable second = window(std::ptrdiff_t(apart.x.parameter().numel()));
  const auto rest = values_of(second);
  joined.insert(joined.end(), rest.begin(), rest.end());
  check_to_largest("y", joined, as_double(y), 1e-6);
  check_to_largest("hidden", apart.hidden.values, as_double(together.hidden.values), 1e-6);
  check_to_largest("cell", apart.cell.values, as_double(together.cell.values), 1e-6);
  // From a state of zeros the second window gives something else.
  LstmSetUp reset(half);
  std::copy(xs.begin() + 45, xs.end(), reset.x.parameter().value());
  reset.states.reset_states();
  CHECK(values_of(reset.run()) != rest);
}

TEST_CASE("lstm without a state begins every batch with zeros") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  LstmSetUp set_up({3, 4, 5, 20});
  const auto run = [&] { return values_of(lstm(activation(set_up.x.variable()), 3, set_up.weights(), {})); };
  const auto without = run();
  CHECK(run() == without);
  CHECK(values_of(set_up.run()) != without);
  set_up.states.reset_states();
  CHECK(values_of(set_up.run()) == without);
  CHECK_THROWS_AS(lstm(set_up.x.variable(), 3, set_up.weights(), {&set_up.hidden, nullptr}), Error);
}

TEST_CASE("lstm: any number of threads agrees within rounding, one number bit for bit") {
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
    check_to_largest("dW_hh", other_dw, as_double(dw), 1e-5);
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
  const LstmWeights weights = other.weights();
  CHECK_THROWS_AS(lstm(other.x.variable(), 4, weights, {&other.hidden, &other.cell}), Error);
  CHECK_THROWS_AS(lstm(other.x.variable(), 3, weights, {&other.hidden, &other.cell}), Error);
  CHECK_THROWS_AS(lstm(other.x.variable(), 2,
                       {weights.recurrent, weights.recurrent, weights.input_bias, weights.recurrent_bias},
                       {&other.hidden, &other.cell}),
                  Error);
}

TEST_CASE("embedding takes a row per token, step by step, and adds up the gradients of equal tokens") {
  const OnDevice device;
  const std::int64_t batch = 3, steps = 4, tokens = 7, width = 300;
  const std::vector<float> ids{0, 6, 6, 2, 1, 6, 0, 0, 3, 3, 3, 3};
  const Leaf tokens_of({batch, steps, 1, 1}, ids);
  const Variable input(to_layout(tokens_of.variable().value(), layouts(steps)[0]));
  const auto table = random_values(tokens * width, 1), dy = random_values(steps * batch * width, 2);
  const Leaf weight({tokens, width}, table);
  for (const int threads : {1, 3}) {
    const Threads use(threads);
    for (int pass = 0; pass < 2; ++pass) {  // the second overwrites the first
      weight.clear();
      const Variable y = embedding(input, weight.variable());
      REQUIRE(y.shape() == Shape({steps * batch, width}));
      std::vector<float> expected, gradient(table.size(), 0.0f);
      for (std::int64_t r = 0; r < steps * batch; ++r)
        for (std::int64_t j = 0; j < width; ++j) {
          const auto id = std::int64_t(ids[std::size_t(r % batch * steps + r / batch)]);
          const auto from = std::size_t(id * width + j);
          expected.push_back(table[from]);
          gradient[from] += dy[std::size_t(r * width + j)];
        }
      CHECK(values_of(y) == expected);
      backward(weighted_sum(y, dy));
      CHECK(weight.gradient() == gradient);
    }
  }
  const std::vector<float> once = weight.gradient();
  weight.clear();
  backward_from({{embedding(input, weight.variable()), dy}, {embedding(input, weight.variable()), dy}});
  for (std::size_t i = 0; i < table.size(); ++i)
    CHECK(weight.gradient()[i] == Approx(2 * once[i]).margin(1e-5));
  if (on_gpu()) return;  // where the host does not read the tokens
  for (const float bad : {7.0f, -1.0f})
    CHECK(says(error_text([&] {
                 embedding(Variable(Tensor::from({bad}, {1, 1, 1, 1})), weight.variable());
               }),
               {"of 7 tokens"}));
}

TEST_CASE("exp, the logistic function and tanh of lanes are those of the standard library") {
  std::vector<float> xs{0.0f, -0.0f, 0.625f, -0.625f, 87.0f, -87.0f, 1e-20f, 30.0f};
  for (int i = -4000; i <= 4000; ++i) xs.push_back(float(i) * 0.02f + 1e-4f);
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
    CHECK(std::abs(s[i] - logistic(x)) <= 2e-7);
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
