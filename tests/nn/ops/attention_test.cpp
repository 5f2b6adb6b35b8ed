#include "nn/core/pass_cost.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;

namespace {

struct Attention {
  std::int64_t heads, kv_heads, batch, steps, width;
  bool causal;
  float scale = 1;  // of the queries: the greater, the sharper the softmax

  std::int64_t rows() const { return steps * batch; }
  std::int64_t columns() const { return (heads + 2 * kv_heads) * width; }
  Variable operator()(const Variable& qkv) const { return attention(qkv, heads, kv_heads, batch, causal); }
  std::vector<float> input(std::uint32_t stream) const {
    auto values = random_values(rows() * columns(), stream);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (std::int64_t(i) % columns() < heads * width) values[i] *= scale;
    return rounded_to(activation_type(), std::move(values));
  }
  std::size_t at(std::int64_t t, std::int64_t b, std::int64_t head) const {  // in qkv
    return std::size_t((t * batch + b) * columns() + head * width);
  }
  std::size_t out(std::int64_t t, std::int64_t b, std::int64_t head) const {
    return std::size_t((t * batch + b) * heads + head) * std::size_t(width);
  }

  // The value, and with dy the gradient, by the formula in double, for query head h of sequence b.
  void run(std::int64_t b, std::int64_t h, const Array& x, Array& y, const Array& dy, Array& dx) const {
    const std::int64_t g = h / (heads / kv_heads), key = heads + g, value = heads + kv_heads + g;
    const double by = 1 / std::sqrt(double(width));
    const auto dot = [&](const Array& p, std::size_t i, const Array& q, std::size_t j) {
      double sum = 0;
      for (std::size_t c = 0; c < std::size_t(width); ++c) sum += p[i + c] * q[j + c];
      return sum;
    };
    const auto add = [&](Array& to, std::size_t i, double factor, const Array& from, std::size_t j) {
      for (std::size_t c = 0; c < std::size_t(width); ++c) to[i + c] += factor * from[j + c];
    };
    for (std::int64_t t = 0; t < steps; ++t) {
      const std::int64_t end = causal ? t + 1 : steps;
      Array p;
      for (std::int64_t u = 0; u < end; ++u) p.push_back(by * dot(x, at(t, b, h), x, at(u, b, key)));
      const double top = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& v : p) sum += v = std::exp(v - top);
      for (double& v : p) v /= sum;
      for (std::int64_t u = 0; u < end; ++u) add(y, out(t, b, h), p[std::size_t(u)], x, at(u, b, value));
      const double d = dot(dy, out(t, b, h), y, out(t, b, h));
      for (std::int64_t u = 0; u < end; ++u) {
        const double weight = p[std::size_t(u)],
                     ds = weight * (dot(dy, out(t, b, h), x, at(u, b, value)) - d);
        add(dx, at(u, b, value), weight, dy, out(t, b, h));
        add(dx, at(t, b, h), ds * by, x, at(u, b, key));
        add(dx, at(u, b, key), ds * by, x, at(t, b, h));
      }
    }
  }
};

// By a tensor's largest element.
void check_near(const std::string& what, const std::vector<float>& actual, const Array& expected,
                double tolerance) {
  const Array sizes = absolute(expected);
  check_close(what, actual, expected, Array(sizes.size(), *std::max_element(sizes.begin(), sizes.end())),
              tolerance);
}

Probe run(const Attention& op, const std::vector<float>& x, const std::vector<float>& dy) {
  return probe([&](auto v) { return op(v[0]); }, {{{op.rows(), op.columns()}, x}}, dy, test_device(),
               activation_type());
}

void check_formula(const Attention& op) {
  INFO(op.heads << " heads, " << op.kv_heads << " of keys, " << op.batch << " sequences of " << op.steps
                << ", width " << op.width << (op.causal ? ", causal" : ", full"));
  const auto x = op.input(1), dy = random_activations(op.rows() * op.heads * op.width, 2);
  const Probe result = run(op, x, dy);
  Array y(dy.size()), dx(x.size());
  for (std::int64_t b = 0; b < op.batch; ++b)
    for (std::int64_t h = 0; h < op.heads; ++h) op.run(b, h, as_double(x), y, as_double(dy), dx);
  // A rounding of a score changes its weight by as much: the greater the scores, the more.
  const double tolerance = rounding(2e-6 * (1 + op.scale));
  check_near("y", result.value, y, tolerance);
  // The backward pass takes D of the value as it is stored: in bfloat16 its rounding goes into every dS.
  check_near("dqkv", result.gradients[0], dx, (activation_type() == DType::bf16 ? 5 : 2) * tolerance);
}

struct BFloat16OnCpu {
  BFloat16OnCpu() { activation_type() = DType::bf16; }
  ~BFloat16OnCpu() { activation_type() = DType::f32; }
};

bool is_nan(const std::vector<float>& values, std::size_t from, std::int64_t n) {
  return std::all_of(values.begin() + std::ptrdiff_t(from), values.begin() + std::ptrdiff_t(from) + n,
                     [](float v) { return std::isnan(v); });
}
bool is_finite(const std::vector<float>& values, std::size_t from, std::int64_t n) {
  return std::all_of(values.begin() + std::ptrdiff_t(from), values.begin() + std::ptrdiff_t(from) + n,
                     [](float v) { return std::isfinite(v); });
}

}  // namespace

TEST_CASE("attention agrees with the formula, forward and backward, for any length, width and grouping") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const bool causal : {false, true})
    for (const Attention& op :
         {Attention{1, 1, 1, 1, 1, causal}, Attention{2, 1, 3, 7, 5, causal},
          Attention{4, 2, 2, 17, 16, causal, 5}, Attention{3, 3, 1, 97, 12, causal, 20},
          Attention{2, 2, 1, 64, 64, causal}, Attention{6, 2, 1, 33, 40, causal, 3},
          Attention{2, 1, 1, 201, 9, causal, 10}, Attention{1, 1, 2, 100, 130, causal},
          Attention{4, 2, 1, 201, 64, causal, 3},  // several tiles of each width that a GPU tells apart
          Attention{2, 2, 1, 130, 32, causal}, Attention{2, 1, 1, 150, 80, causal},
          Attention{1, 1, 1, 100, 128, causal}, Attention{1, 1, 1, 70, 256, causal}})
      check_formula(op);
}

TEST_CASE("attention of bfloat16 on a CPU rounds the value and the gradients alone") {
  const BFloat16OnCpu bf16;
  for (const bool causal : {false, true}) {
    check_formula({4, 2, 2, 103, 20, causal, 5});
    check_formula({1, 1, 1, 30, 7, causal});
  }
}

TEST_CASE("attention at 8,192 tokens takes memory that is linear in the tokens, and is right there") {
  const Threads scope(1);
  const auto peak = [](std::int64_t steps) {
    const Attention op{2, 1, 1, steps, 4, true, 4};
    const auto x = op.input(3);
    std::vector<float> dy(std::size_t(op.rows() * op.heads * op.width));
    const std::size_t last = op.out(steps - 1, 0, 1);
    for (std::size_t c = 0; c < 4; ++c) dy[last + c] = 1 + float(c);
    const PassCost cost;
    const Probe result = run(op, x, dy);
    // The last token sees all; its gradient is the only one.
    Array p, y(4);
    double sum = 0;
    for (std::int64_t u = 0; u < steps; ++u) {
      double score = 0;
      for (std::size_t c = 0; c < 4; ++c)
        score += double(x[op.at(steps - 1, 0, 1) + c]) * x[op.at(u, 0, 2) + c];
      sum += p.emplace_back(std::exp(score / 2));
    }
    Array dv(std::size_t(steps) * 4);
    std::vector<float> found;
    for (std::int64_t u = 0; u < steps; ++u)
      for (std::size_t c = 0; c < 4; ++c) {
        const double weight = p[std::size_t(u)] / sum;
        y[c] += weight * x[op.at(u, 0, 3) + c];
        dv[std::size_t(u) * 4 + c] = weight * dy[last + c];
        found.push_back(result.gradients[0][op.at(u, 0, 3) + c]);
      }
    check_near("the last token", {result.value.begin() + std::ptrdiff_t(last), result.value.end()}, y, 1e-5);
    check_near("dv", found, dv, 1e-5);
    return double(cost.peak_bytes());
  };
  const double half = peak(4096), whole = peak(8192);
  CHECK(whole < 2.05 * half);
  CHECK(whole < 0.05 * 8192 * 8192 * sizeof(float));
}

TEST_CASE("attention has the same bits on any number of threads, of which it may have more than heads") {
  for (const Attention& op : {Attention{4, 2, 3, 100, 20, true},
                              {2, 1, 1, 500, 16, true},
                              {1, 1, 1, 500, 16, false},
                              {6, 3, 1, 300, 8, true},
                              {1, 1, 1, 50, 32, true}}) {
    INFO(op.heads << " heads, " << op.kv_heads << " of keys, " << op.batch << " sequences of " << op.steps);
    const auto x = op.input(4), dy = random_values(op.rows() * op.heads * op.width, 5);
    std::vector<Probe> results;
    for (const int threads : {1, 2, 3, 4, 7}) {
      const Threads scope(threads);
      results.push_back(run(op, x, dy));
      CHECK(same_bits(results.back().value, results[0].value));
      CHECK(same_bits(results.back().gradients[0], results[0].gradients[0]));
    }
  }
}

TEST_CASE("a NaN in attention reaches what sees it and its gradients, and no tokens of earlier blocks") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const Attention op{2, 1, 2, 230, 6, true};
  const std::int64_t token = 215, before = 190;
  const auto dy = random_activations(op.rows() * op.heads * op.width, 7);
  for (const std::int64_t head : {0, 2, 3}) {  // a query, a key, a value of sequence 1
    INFO("in head " << head << " of the input");
    auto x = op.input(6);
    x[op.at(token, 1, head) + 2] = NAN;
    const Probe result = run(op, x, dy);
    for (const std::int64_t h : {0, 1}) {
      CHECK(is_finite(result.value, op.out(op.steps - 1, 0, h), op.width));  // the other sequence
      CHECK(is_finite(result.value, op.out(before, 1, h), op.width));
      const bool hit = head != 0 || h == 0;
      CHECK(std::isnan(result.value[op.out(token, 1, h) + 2]) == hit);
      CHECK(std::isnan(result.value[op.out(op.steps - 1, 1, h) + 2]) == (hit && head != 0));
      CHECK(is_nan(result.gradients[0], op.at(token, 1, h), op.width) == hit);
    }
    // The keys that a token with a NaN has seen; a key's own.
    CHECK(is_nan(result.gradients[0], op.at(5, 1, 2), op.width));
    CHECK(is_finite(result.gradients[0], op.at(5, 0, 2), op.width));
  }
}

TEST_CASE("attention refuses heads and rows that do not fit") {
  const Variable x(Tensor::zeros({12, 24}));
  CHECK_NOTHROW(attention(x, 4, 2, 3, true));           // 8 heads of 3
  CHECK_THROWS_AS(attention(x, 4, 3, 3, true), Error);  // 4 heads on 3
  CHECK_THROWS_AS(attention(x, 0, 1, 3, true), Error);
  CHECK_THROWS_AS(attention(x, 1, 0, 3, true), Error);
  CHECK_THROWS_AS(attention(x, 5, 5, 3, true), Error);  // rows of 24 are not 15 heads
  CHECK_THROWS_AS(attention(x, 4, 2, 5, true), Error);  // 12 rows are not 5 sequences
  CHECK_THROWS_AS(attention(x, 4, 2, 0, true), Error);
  CHECK_THROWS_AS(attention(Variable(Tensor::zeros({2, 3, 4, 1})), 1, 1, 1, true), Error);
}
