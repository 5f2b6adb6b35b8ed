// gelu, gelu_tanh and swiglu.
#include <cmath>

#include "nn/ops/ops.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr double kPi = 3.14159265358979323846;

double normal_distribution(double x) {
  return std::erfc(-x / std::sqrt(2.0)) / 2;
}
double tanh_argument(double x) {
  return std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x);
}
double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

struct Gelu {
  const char* name;
  Variable (*op)(const Variable&);
  double (*value)(double);
  double (*slope)(double);
};
const std::vector<Gelu> kGelus{
    {"gelu", gelu, [](double x) { return x * normal_distribution(x); },
     [](double x) { return normal_distribution(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * kPi); }},
    {"gelu_tanh", gelu_tanh, [](double x) { return x * (1 + std::tanh(tanh_argument(x))) / 2; },
     [](double x) {
       const double t = std::tanh(tanh_argument(x));
       return (1 + t) / 2 + x * (1 - t * t) / 2 * std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * x * x);
     }},
};

}  // namespace

TEST_CASE("gelu and gelu_tanh are within 1e-6 of their formulas, and so are their slopes") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const Gelu& g : kGelus)
    for (const std::int64_t n : {7, 5000, 60001}) {  // -15 to 15 in steps of 1 / 2000, more than one thread's
      INFO(g.name << " of " << n);
      std::vector<float> values;
      for (std::int64_t i = 0; i < n; ++i)
        values.push_back(static_cast<float>(-15 + 30 * static_cast<double>(i) / static_cast<double>(n - 1)));
      values = rounded_to(activation_type(), values);
      const auto dy = random_activations(n, 1);
      Leaf x({n, 1}, values);
      const Variable y = g.op(activation(x.variable()));
      const auto forward = values_of(y);
      backward(weighted_sum(y, dy));
      Array ry, rdx, y_scale, dx_scale;
      for (std::size_t i = 0; i < values.size(); ++i) {
        ry.push_back(g.value(values[i]));
        rdx.push_back(g.slope(values[i]) * dy[i]);
        y_scale.push_back(std::max(1.0, std::abs(ry.back())));
        dx_scale.push_back(1.2 * std::abs(dy[i]));
      }
      check_close("y", forward, ry, y_scale, rounding(1e-6));
      check_close("dx", x.gradient(), rdx, dx_scale, rounding(1e-6));
    }
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

TEST_CASE("gelu and gelu_tanh have their limits at infinity, and let a NaN through") {
  const OnDevice device;
  const std::vector<float> x{-INFINITY, -3e38f, -1e30f, -1e4f, -20, 20, 1e4f, 1e30f, 3e38f, INFINITY};
  for (const Gelu& g : kGelus)
    for (const std::int64_t copies : {1, 7}) {  // in vectors, and one by one
      std::vector<float> values;
      for (std::int64_t i = 0; i < copies; ++i) values.insert(values.end(), x.begin(), x.end());
      const auto n = static_cast<std::int64_t>(values.size());
      Leaf leaf({n, 1}, values);
      const Variable y = g.op(leaf.variable());
      const auto actual = values_of(y);
      backward(weighted_sum(y, std::vector<float>(values.size(), 1)));
      const auto slope = leaf.gradient();
      for (std::size_t i = 0; i < values.size(); ++i) {
        INFO(g.name << " of " << values[i]);
        CHECK(actual[i] == (values[i] < 0 ? 0 : values[i]));
        CHECK(slope[i] == (values[i] < 0 ? 0.0f : 1.0f));
      }
      const auto none = values_of(
          g.op(Variable(Tensor::from(std::vector<float>(37, std::nanf("")), {37, 1}, test_device()))));
      for (const float v : none) CHECK(std::isnan(v));
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
      const auto run = [&](int threads) {
        const Threads scope(threads);
        const std::int64_t rows = 301, columns = 38, outputs = op == swiglu ? columns / 2 : columns;
        return probe([&](std::span<const Variable> in) { return op(in[0]); },
                     {{{rows, columns}, random_values(rows * columns, 1)}}, random_values(rows * outputs, 2),
                     Device{}, type);
      };
      const Probe once = run(1);
      for (const int threads : {2, 3, 5}) CHECK(run(threads) == once);
    }
}
