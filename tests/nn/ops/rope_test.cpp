#include "nn/ops/rope_rule.h"
#include "tests/support/any_threads.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct RopeCase {
  std::int64_t steps, batch, heads, kv_heads, d;
  float base = 10000;
  std::int64_t width() const { return (heads + 2 * kv_heads) * d; }
  Shape shape() const { return {steps * batch, width()}; }
  Variable apply(Variable qkv) const { return rope(std::move(qkv), heads, kv_heads, batch, base); }

  // By the formula, in double; by minus the angles with direction -1. scale: the magnitudes of the terms.
  Array reference(const Array& x, double direction, Array& scale) const {
    Array y = x;
    scale = reference::absolute(x);
    for (std::int64_t row = 0; row < steps * batch; ++row)
      for (std::int64_t h = 0; h < heads + kv_heads; ++h)
        for (std::int64_t j = 0; j < d / 2; ++j) {
          const auto t = double(row / batch);
          const double angle = direction * t * std::pow(base, -2.0 * double(j) / double(d));
          const std::int64_t at = row * width() + h * d + j, other = at + d / 2;
          y[at] = x[at] * std::cos(angle) - x[other] * std::sin(angle);
          y[other] = x[other] * std::cos(angle) + x[at] * std::sin(angle);
          scale[at] = scale[other] = std::abs(x[at]) + std::abs(x[other]);
        }
    return y;
  }
};

const std::vector<RopeCase> kCases{{1, 1, 1, 1, 2},      {5, 1, 2, 1, 4},        {7, 3, 4, 4, 32},
                                   {70, 2, 6, 2, 34},    {40, 1, 5, 5, 64},      {3, 5, 2, 1, 6, 500000},
                                   {9, 2, 1, 1, 512, 1}, {2, 40, 3, 3, 16, 1e6f}};

// On the CPU, of rows that bfloat16 has.
Probe cpu_probe(const RopeCase& c, DType type) {
  const std::int64_t n = c.shape().numel();
  return probe([&](std::span<const Variable> in) { return c.apply(in[0]); },
               {{c.shape(), rounded_to(DType::bf16, random_values(n, 1))}},
               rounded_to(DType::bf16, random_values(n, 2)), Device{}, type);
}

// The same values in memory that nobody else holds.
Variable copy_of(const Variable& x) {
  return add(x, Variable(Tensor::zeros(x.shape(), Layout::plain, x.value().device())));
}

}  // namespace

TEST_CASE("rope agrees with its formula, forward and backward, in place and not") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const RopeCase& c : kCases)
    for (const bool in_place : {false, true}) {
      INFO(c.steps << " positions, " << c.batch << " sequences, " << c.heads << " and " << c.kv_heads
                   << " heads of " << c.d << (in_place ? ", in place" : ""));
      const auto values = random_activations(c.shape().numel(), 1),
                 dy = random_activations(c.shape().numel(), 2);
      const Leaf x(c.shape(), values);
      Variable qkv = copy_of(activation(x.variable()));
      const float* memory = qkv.value().data();
      const Variable held = in_place ? Variable() : qkv;
      const Variable y = c.apply(std::move(qkv));
      CHECK((y.value().data() == memory) == in_place);
      const auto forward = values_of(y);
      if (!in_place) CHECK(values_of(held) == values);
      backward(weighted_sum(y, dy));
      Array y_scale, dx_scale;
      const Array expected = c.reference(as_double(values), 1, y_scale),
                  dx = c.reference(as_double(dy), -1, dx_scale);
      check_close("y", forward, expected, y_scale, rounding(4e-7));
      check_close("dx", x.gradient(), dx, dx_scale, rounding(4e-7));
    }
}

// Of LlamaRotaryEmbedding and apply_rotary_pos_emb of transformers 5.24 on PyTorch 2.15, in float64: the last of 3
// positions, 2 heads of queries, 1 of keys and values, d = 4.
TEST_CASE("rope has the values of Hugging Face's LLaMA") {
  const OnDevice device;
  std::vector<float> x, dy;
  for (int i = 0; i < 48; ++i) {
    x.push_back(float(i * 7 % 16 - 8) / 4);
    dy.push_back(float(i * 5 % 16 - 8) / 4);
  }
  const Array y{-0.531652467144,
                -0.234951001647,
                -2.44281510847,
                -0.754849671673,
                -0.87079554996,
                -1.21475234162,
                0.701224008552,
                -1.77464834503,
                0.454648713413,
                1.7246516783,
                0.208073418274,
                1.28474767505,
                -1,
                0.75,
                -1.5,
                0.25};
  const Array dx{1.28694238651,
                 -0.714852338287,
                 1.61052143538,
                 1.76464901169,
                 1.78009297679,
                 0.2249516683,
                 0.285077172005,
                 -1.25474967501,
                 -1.36394614024,
                 1.24475034166,
                 0.624220254821,
                 -0.274948335033,
                 1,
                 -1.75,
                 -0.5,
                 0.75};
  const Leaf leaf({3, 16}, x);
  const Variable out = rope(leaf.variable(), 2, 1, 1);
  const auto last = [](const std::vector<float>& all) { return std::vector(all.end() - 16, all.end()); };
  check_close("y", last(values_of(out)), y, Array(16, 2), 3e-7);
  backward(weighted_sum(out, dy));
  check_close("dx", last(leaf.gradient()), dx, Array(16, 2), 3e-7);
}

TEST_CASE("rope's cosines and sines keep their digits at any position") {
  // At 2^30 the angle itself is off by up to 2^30 * 3 * 2^-53 = 4e-7 in double.
  for (const auto& [from, error] : std::vector<std::pair<std::int64_t, double>>{
           {0, 1e-7}, {1000, 1e-7}, {100000, 1e-7}, {1 << 20, 1e-7}, {1 << 30, 5e-7}}) {
    double worst = 0;
    for (std::int64_t t = from; t < from + 300; ++t)
      for (const double angle : {1.0, 0.7498942093, 0.0251188643, 1e-4, 2e-6}) {
        const double by = double(t) * angle;
        const Rotation r = rotation_of(double(t) * (angle * 0.63661977236758134308));
        worst = std::max({worst, std::abs(r.cosine - std::cos(by)), std::abs(r.sine - std::sin(by))});
      }
    INFO("from position " << from << ": " << worst);
    CHECK(worst < error);
  }
  const Rotation none = rotation_of(0);
  CHECK(none.cosine == 1);
  CHECK(none.sine == 0);
}

TEST_CASE("rope at position 100,000 is within 4e-7 of its formula") {
  const OnDevice device;
  const RopeCase c{100003, 1, 1, 1, 4};
  const auto values = random_values(c.shape().numel(), 1);
  const auto y = values_of(c.apply(Variable(Tensor::from(values, c.shape(), test_device()))));
  Array scale;
  const Array expected = c.reference(as_double(values), 1, scale);
  check_close("y", y, expected, scale, 4e-7);
}

TEST_CASE("an input of rope that another op reads too is left alone, and its gradients add up") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const RopeCase c{6, 2, 2, 1, 8};
  const auto values = random_activations(c.shape().numel(), 1), dy = random_activations(c.shape().numel(), 2);
  const Leaf x(c.shape(), values);
  const Variable qkv = relu(copy_of(activation(x.variable())));  // relu's backward pass reads its value
  const auto before = values_of(qkv);
  const Variable y = c.apply(qkv), z = c.apply(qkv);
  CHECK(values_of(qkv) == before);
  CHECK(values_of(y) == values_of(z));
  backward_from({{y, dy}, {z, dy}, {qkv, dy}});
  Array scale;
  Array expected = c.reference(as_double(dy), -1, scale);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = values[i] > 0 ? 2 * expected[i] + dy[i] : 0;
    scale[i] = 2 * scale[i] + std::abs(dy[i]);
  }
  const double tolerance = 2 * rounding(4e-7);  // each sum of gradients is rounded
  check_close("dx", x.gradient(), expected, scale, tolerance);
  // Two that are handed one gradient, which neither may turn for the other.
  const Leaf shared(c.shape(), values);
  const Variable both = add(c.apply(shared.variable()), c.apply(shared.variable()));
  backward(weighted_sum(both, dy));
  expected = c.reference(as_double(dy), -1, scale);
  check_close("dx", shared.gradient(), reference::plus(expected, expected), reference::plus(scale, scale),
              tolerance);
  // One whose own backward pass reads the value is not exclusive, though nobody else has it.
  const Leaf again(c.shape(), values);
  const Variable of_relu = c.apply(relu(copy_of(activation(again.variable()))));
  CHECK(values_of(of_relu) == values_of(y));
  backward(weighted_sum(of_relu, dy));
  expected = c.reference(as_double(dy), -1, scale);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] *= values[i] > 0;
  check_close("dx", again.gradient(), expected, scale, rounding(4e-7));
}

TEST_CASE("rope gives the same bits for any number of threads, in fp32 and bfloat16") {
  for (const DType type : {DType::f32, DType::bf16})
    for (const RopeCase& c : kCases) check_any_threads([&] { return cpu_probe(c, type); });
}

TEST_CASE("rope in bfloat16 on a CPU is that in fp32 of the rounded rows, rounded once") {
  const RopeCase c{11, 2, 3, 1, 20};
  const Probe narrow = cpu_probe(c, DType::bf16), wide = cpu_probe(c, DType::f32);
  CHECK(same_bits(narrow.value, rounded_to(DType::bf16, wide.value)));
  CHECK(same_bits(narrow.gradients[0], rounded_to(DType::bf16, wide.gradients[0])));
}

TEST_CASE("rope refuses shapes that do not fit") {
  const auto of = [](const Shape& shape, std::int64_t heads, std::int64_t kv_heads, std::int64_t batch,
                     float base = 10000) {
    return rope(Variable(Tensor::zeros(shape)), heads, kv_heads, batch, base);
  };
  CHECK_NOTHROW(of({6, 16}, 2, 1, 3));
  CHECK_THROWS_AS(of({6, 12}, 2, 1, 3), Error);  // d = 3
  CHECK_THROWS_AS(of({6, 18}, 2, 1, 3), Error);
  CHECK_THROWS_AS(of({6, 16}, 2, 1, 4), Error);
  CHECK_THROWS_AS(of({6, 16}, 0, 2, 3), Error);
  CHECK_THROWS_AS(of({6, 16}, 4, 0, 3), Error);
  CHECK_THROWS_AS(of({6, 16}, 2, 1, 0), Error);
  CHECK_THROWS_AS(of({6, 0}, 2, 1, 3), Error);
  CHECK_THROWS_AS(of({2, 4, 2, 2}, 2, 1, 1), Error);
  CHECK_THROWS_AS(of({2, 3 * 514}, 1, 1, 1), Error);
  CHECK_THROWS_AS(of({6, 16}, 2, 1, 3, 0.5f), Error);
  CHECK_THROWS_AS(of({6, 16}, 2, 1, 3, std::numeric_limits<float>::infinity()), Error);
}
