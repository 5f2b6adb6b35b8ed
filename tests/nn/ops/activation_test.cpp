// Activation functions, each element by itself, and swiglu.
#include "tests/support/any_threads.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;
using reference::logistic;

namespace {

constexpr double kPi = 3.14159265358979323846;

double normal_distribution(double x) {
  return std::erfc(-x / std::sqrt(2.0)) / 2;
}
double tanh_argument(double x) {
  return std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x);
}

struct Activation {
  std::string name;
  Variable (*op)(const Variable&);
  double (*value)(double);
  double (*slope)(double);
  float lower = 0, upper = INFINITY;  // limits at infinity; without an upper one the number itself
  double tolerance = 1e-6;
  bool absolute = false;  // errors are relative to 1 and more
};

const std::vector<Activation> kActivations{
    {"relu", relu, [](double x) { return std::max(x, 0.0); }, [](double x) { return x > 0 ? 1.0 : 0.0; }, 0,
     INFINITY, 0},
    {"relu6", relu6, [](double x) { return std::min(std::max(x, 0.0), 6.0); },
     [](double x) { return x > 0 && x < 6 ? 1.0 : 0.0; }, 0, 6},
    {"clamp", [](const Variable& x) { return clamp(x, -0.5f, 2.0f); },
     [](double x) { return std::min(std::max(x, -0.5), 2.0); },
     [](double x) { return x > -0.5 && x < 2 ? 1.0 : 0.0; }, -0.5f, 2},
    {"hardswish", hardswish, [](double x) { return x * std::min(std::max(x + 3, 0.0), 6.0) / 6; },
     [](double x) { return x <= -3  ? 0.0
                           : x >= 3 ? 1.0
                                    : x / 3 + 0.5; }},
    {"sigmoid", sigmoid, logistic, [](double x) { return logistic(x) * logistic(-x); }, 0, 1},
    {"silu", silu, [](double x) { return x * logistic(x); },
     [](double x) { return logistic(x) * (1 + x * logistic(-x)); }},
    {"gelu", gelu, [](double x) { return x * normal_distribution(x); },
     [](double x) { return normal_distribution(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * kPi); }, 0,
     INFINITY, 1e-6, true},
    {"gelu_tanh", gelu_tanh, [](double x) { return x * (1 + std::tanh(tanh_argument(x))) / 2; },
     [](double x) {
       const double t = std::tanh(tanh_argument(x));
       return (1 + t) / 2 + x * (1 - t * t) / 2 * std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * x * x);
     },
     0, INFINITY, 1e-6, true},
};

void check_formula(const Activation& a, const Shape& shape, std::vector<float> values) {
  values = rounded_to(activation_type(), values);
  const auto dy = random_activations(shape.numel(), 2);
  Array ry(values.size()), rdx(ry), y_scale(ry), dx_scale(ry);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i], g = std::abs(dy[i]);
    ry[i] = a.value(x);
    rdx[i] = a.slope(x) * dy[i];
    y_scale[i] = a.absolute ? std::max(1.0, std::abs(ry[i])) : std::abs(ry[i]) + 1e-34;  // e^-87 is the least
    // Two float terms of about (1 + |x|) s(x) meet in silu's slope.
    dx_scale[i] = a.absolute ? 1.2 * g : std::abs(rdx[i]) + (1 + std::abs(x)) * logistic(x) * g;
  }
  for (const Layout layout : shape.rank() == 4 ? layouts(shape[1]) : std::vector<Layout>{Layout::plain}) {
    INFO(a.name << " of " << shape.str() << (layout == Layout::blocked ? ", blocked" : ""));
    Leaf x(shape, values);
    const Variable y = a.op(activation(x.variable(), layout));
    CHECK(y.value().layout() == layout);
    const auto forward = values_of(y);
    backward(weighted_sum(y, dy));
    check_close("y", forward, ry, y_scale, rounding(a.tolerance));
    check_close("dx", x.gradient(), rdx, dx_scale, rounding(a.tolerance));
  }
}

}  // namespace

TEST_CASE("activation functions are within 1e-6 of their formulas, and so are their slopes") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const std::vector<float> special{0.0f,   -0.0f,   1e-40f, 6.0f,  3.0f,   -3.0f, -0.5f, 2.0f,
                                   100.0f, -100.0f, 1e-30f, 20.0f, -20.0f, 88.0f, -88.0f};
  for (const Activation& a : kActivations) {
    for (const Shape& shape : {Shape{1, 16, 1, 3}, Shape{9, 16, 17, 15}}) {
      auto values = random_values(shape.numel(), 1);
      for (float& v : values) v *= 4;
      std::copy(special.begin(), special.end(), values.begin());
      check_formula(a, shape, values);
    }
    for (const std::int64_t n : {7, 5000, 60001}) {  // -15 to 15 in steps of 1 / 2000, more than one thread's
      std::vector<float> values;
      for (std::int64_t i = 0; i < n; ++i) values.push_back(float(-15 + 30 * double(i) / double(n - 1)));
      check_formula(a, {n, 1}, values);
    }
  }
}

TEST_CASE("activation functions and their slopes have their limits at infinity, and a NaN comes through") {
  const OnDevice device;
  const std::vector<float> x{-INFINITY, -3e38f, -1e30f, -1e4f, -89, 89, 1e4f, 1e30f, 3e38f, INFINITY};
  for (const Activation& a : kActivations)
    for (const std::int64_t copies : {1, 7}) {  // in vectors, and one by one
      std::vector<float> values;
      for (std::int64_t i = 0; i < copies; ++i) values.insert(values.end(), x.begin(), x.end());
      if (a.absolute) values.insert(values.end(), {-20, 20});
      const auto n = std::int64_t(values.size());
      Leaf leaf({n, 1}, values);
      const Variable y = a.op(leaf.variable());
      const auto actual = values_of(y);
      backward(weighted_sum(y, std::vector<float>(values.size(), 1)));
      const auto slope = leaf.gradient();
      for (std::size_t i = 0; i < values.size(); ++i) {
        INFO(a.name << " of " << values[i]);
        const bool below = values[i] < 0, open = !below && a.upper == INFINITY;
        const float least = a.absolute ? 0 : 1e-34f;
        CHECK((below ? std::abs(actual[i] - a.lower) <= least : actual[i] == (open ? values[i] : a.upper)));
        CHECK(std::abs(slope[i] - (open ? 1.0f : 0.0f)) <= least);
      }
      const Tensor none = Tensor::from(std::vector<float>(37, std::nanf("")), {37, 1}, test_device());
      for (const float v : values_of(a.op(Variable(none)))) CHECK(std::isnan(v));
    }
  CHECK_THROWS_AS(clamp(Variable(Tensor::zeros({2})), 1.0f, 1.0f), Error);
}

// Of torch.nn.functional.gelu of PyTorch 2.15, in float64.
TEST_CASE("gelu and gelu_tanh have PyTorch's values") {
  const OnDevice device;
  const std::vector<float> x{-3, -1, -0.5f, 0, 0.25f, 1, 2.5f};
  const struct {
    Variable (*op)(const Variable&);
    Array y, slope;
  } golden[] = {{gelu,
                 {-0.00404969409489, -0.158655253931, -0.154268769363, 0, 0.149676581421, 0.841344746069,
                  2.48447583669},
                 {-0.0119456472042, -0.0833154705877, 0.132504875344, 0.5, 0.695373354884, 1.08331547059,
                  1.03761108591}},
                {gelu_tanh,
                 {-0.00363739208177, -0.158808009392, -0.154285990175, 0, 0.149675350702, 0.841191990608,
                  2.48491573391},
                 {-0.011584166631, -0.0829640838458, 0.132630096465, 0.5, 0.695354095151, 1.08296408385,
                  1.03795157621}}};
  for (const auto& [op, y, slope] : golden) {
    Leaf leaf({7, 1}, x);
    const Variable out = op(leaf.variable());
    check_close("y", values_of(out), y, Array(7, 1), 5e-7);
    backward(weighted_sum(out, std::vector<float>(7, 1)));
    check_close("slope", leaf.gradient(), slope, Array(7, 1), 5e-7);
  }
}

TEST_CASE("swiglu is silu(a) b of a row's halves, and its gradients are the formula's") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const auto& [rows, width] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {3, 5}, {7, 16}, {40, 67}, {300, 128}}) {
    INFO(rows << " rows of 2 x " << width);
    auto values = random_activations(rows * 2 * width, 1);
    for (float& v : values) v *= 4;
    const auto dy = random_activations(rows * width, 2);
    Leaf x({rows, 2 * width}, values);
    const Variable y = swiglu(activation(x.variable()));
    CHECK(y.shape() == Shape{rows, width});
    const auto forward = values_of(y);
    backward(weighted_sum(y, dy));
    Array ry(dy.size()), rdx(values.size()), y_scale(ry), dx_scale(rdx);
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t i = 0; i < width; ++i) {
        const std::int64_t at = row * width + i, of_a = row * 2 * width + i, of_b = of_a + width;
        const double a = values[of_a], b = values[of_b], s = logistic(a), g = dy[at];
        ry[at] = a * s * b, y_scale[at] = std::abs(ry[at]);
        rdx[of_a] = g * b * s * (1 + a * logistic(-a)), rdx[of_b] = g * a * s;
        dx_scale[of_a] = std::abs(g * b) * s * (1 + std::abs(a)), dx_scale[of_b] = std::abs(rdx[of_b]);
      }
    check_close("y", forward, ry, y_scale, rounding(2e-6));
    check_close("dx", x.gradient(), rdx, dx_scale, rounding(2e-6));
  }
  CHECK_THROWS_AS(swiglu(Variable(Tensor::zeros({2, 3}))), Error);
  CHECK_THROWS_AS(swiglu(Variable(Tensor::zeros({2, 4, 1, 1}))), Error);
}

// Of silu(a) * b in PyTorch 2.15, in float64.
TEST_CASE("swiglu has PyTorch's values: a of 0.5, -2, 1.5 and b of 2, 0.25, -1") {
  const OnDevice device;
  Leaf x({1, 6}, {0.5f, -2, 1.5f, 2, 0.25f, -1});
  const Variable y = swiglu(x.variable());
  check_close("y", values_of(y), {0.622459331202, -0.0596014610111, -1.22636171429}, 1e-6);
  backward(weighted_sum(y, {1, -0.5f, 2}));
  check_close("dx", x.gradient(),
              {1.47992237461, 0.0113480310981, -2.0825883086, 0.311229665601, 0.119202922022, 2.45272342858},
              Array(6, 1), 1e-6);
}

TEST_CASE("gelu, gelu_tanh and swiglu give the same bits for any number of threads") {
  for (const DType type : {DType::f32, DType::bf16})
    for (Variable (*op)(const Variable&) : {gelu, gelu_tanh, swiglu}) {
      const std::int64_t rows = 301, columns = 38, outputs = op == swiglu ? columns / 2 : columns;
      check_any_threads([&] {
        return probe([&](std::span<const Variable> in) { return op(in[0]); },
                     {{{rows, columns}, random_values(rows * columns, 1)}}, random_values(rows * outputs, 2),
                     Device{}, type);
      });
    }
}
