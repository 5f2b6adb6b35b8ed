#include "tests/support/any_threads.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr double kEpsilon = 1e-5;

// layer_norm or rms_norm by its formula, in double, its gradients, and the magnitudes of their terms. dx is
// the product with the Jacobian of a row: quadratic in the width, and another formula than the op's.
struct NormReference {
  Array y, dx, dw, db, y_scale, dx_scale, dw_scale, db_scale;

  NormReference(bool centred, std::int64_t rows, std::int64_t width, const Array& x, const Array& w,
                const Array& b, const Array& dy)
      : y(x.size()),
        dx(x.size()),
        dw(w.size()),
        db(w.size()),
        y_scale(y),
        dx_scale(y),
        dw_scale(dw),
        db_scale(dw) {
    const auto n = double(width);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t at = row * width;
      double mean = 0, variance = 0;
      if (centred)
        for (std::int64_t j = 0; j < width; ++j) mean += x[at + j] / n;
      for (std::int64_t j = 0; j < width; ++j) variance += (x[at + j] - mean) * (x[at + j] - mean) / n;
      const double r = 1 / std::sqrt(variance + kEpsilon);
      double sum_scale = 0, product_scale = 0;
      const auto hat_scale = [&](std::int64_t j) { return (std::abs(x[at + j]) + std::abs(mean)) * r; };
      for (std::int64_t j = 0; j < width; ++j) {
        const double hat = (x[at + j] - mean) * r;
        y[at + j] = hat * w[j] + (b.empty() ? 0 : b[j]);
        y_scale[at + j] = hat_scale(j) * std::abs(w[j]) + (b.empty() ? 0 : std::abs(b[j]));
        dw[j] += dy[at + j] * hat, dw_scale[j] += std::abs(dy[at + j]) * hat_scale(j);
        db[j] += dy[at + j], db_scale[j] += std::abs(dy[at + j]);
        sum_scale += std::abs(dy[at + j] * w[j]) / n;
        product_scale += std::abs(dy[at + j] * w[j]) * hat_scale(j) / n;
      }
      for (std::int64_t j = 0; j < width; ++j) {
        for (std::int64_t k = 0; k < width; ++k)  // d xhat_k / d x_j
          dx[at + j] += dy[at + k] * w[k] *
                        (r * ((j == k) - (centred ? 1 / n : 0)) -
                         (x[at + k] - mean) * (x[at + j] - mean) * r * r * r / n);
        dx_scale[at + j] = r * (std::abs(dy[at + j] * w[j]) + sum_scale + hat_scale(j) * product_scale);
      }
    }
  }
};

struct NormKind {
  const char* name;
  bool centred, bias;
  Variable apply(const Variable& x, const Variable& w, const Variable& b) const {
    return centred ? layer_norm(x, w, bias ? b : Variable()) : rms_norm(x, w);
  }
  SumAndNorm add_and_apply(const Variable& x, const Variable& branch, const Variable& w,
                           const Variable& b) const {
    return centred ? add_layer_norm(x, branch, w, bias ? b : Variable()) : add_rms_norm(x, branch, w);
  }
};
const std::vector<NormKind> kKinds{
    {"layer_norm", true, true}, {"layer_norm without a bias", true, false}, {"rms_norm", false, false}};

// On the CPU, of rows that bfloat16 has: the value and the gradients of x, the weight and, if the kind has
// one, the bias.
Probe norm_probe(const NormKind& kind, std::int64_t rows, std::int64_t width, DType type) {
  std::vector<Input> inputs{{{rows, width}, rounded_to(DType::bf16, random_values(rows * width, 1))},
                            {{width}, random_values(width, 2, 1), Layout::plain, true}};
  if (kind.bias) inputs.push_back({{width}, random_values(width, 3), Layout::plain, true});
  return probe(
      [&](std::span<const Variable> in) { return kind.apply(in[0], in[1], kind.bias ? in[2] : Variable()); },
      inputs, rounded_to(DType::bf16, random_values(rows * width, 4)), Device{}, type);
}

}  // namespace

TEST_CASE("layer_norm and rms_norm agree with their formulas, forward and backward, for any width") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  using Size = std::pair<std::int64_t, std::int64_t>;
  for (const NormKind& kind : kKinds)
    for (const auto& [rows, width] :
         {Size{1, 1}, Size{3, 2}, Size{5, 15}, Size{2, 16}, Size{40, 33}, Size{9, 64}, Size{7, 130},
          Size{530, 12}, Size{8200, 8}, Size{3, 768}, Size{2, 1024}, Size{2, 1028}}) {
      INFO(kind.name << " of " << rows << " rows of " << width);
      Leaf x({rows, width}, random_activations(rows * width, 1, 0.5f)),
          w({width}, random_values(width, 2, 1)), b({width}, random_values(width, 3));
      const auto dy = random_activations(rows * width, 4);
      const Variable y = kind.apply(activation(x.variable()), w.variable(), b.variable());
      CHECK(y.value().dtype() == activation_type());
      const auto forward = values_of(y);
      backward(weighted_sum(y, dy));
      const NormReference expected(kind.centred, rows, width, as_double(values_of(x.variable())),
                                   as_double(values_of(w.variable())),
                                   kind.bias ? as_double(values_of(b.variable())) : Array(), as_double(dy));
      check_close("y", forward, expected.y, expected.y_scale, rounding(2e-6));
      check_close("dx", x.gradient(), expected.dx, expected.dx_scale, rounding(2e-6));
      check_close("dw", w.gradient(), expected.dw, expected.dw_scale, 2e-6);
      if (kind.bias) check_close("db", b.gradient(), expected.db, expected.db_scale, 2e-6);
    }
}

// Of layer_norm and rms_norm in torch.nn.functional of PyTorch 2.15, in float64.
TEST_CASE("layer_norm and rms_norm have PyTorch's values") {
  const OnDevice device;
  const std::vector<float> x{0.5f, -1.25f, 2, 0.75f, -0.25f, 3, 3.5f, -2, 1, 0.125f};
  const std::vector<float> dy{1, -0.5f, 0.25f, 2, -1, 0.5f, 1.5f, -0.75f, 0.125f, 1};
  const struct {
    NormKind kind;
    Array y, dx, dw;
  } golden[] = {{kKinds[0],
                 {0.45845757991, 0.741182506345, 0.528688919337, 1.24118250635, -0.291915159819,
                  1.65845066283, -0.594679168752, -2.56494518093, 0.374804385526, -0.250586843422},
                 {0.362340897047, -0.159057036773, -1.34149939684, 2.58757912476, -1.44936358819,
                  0.294621920145, -0.471465313468, -0.307416299013, 0.103884878271, 0.380374814064},
                 {0.608455274217, 2.5252200126, 1.55588111553, 0.733357780441, 0.0551044218629}},
                {kKinds[2],
                 {0.660976406965, 0.550813672471, 1.76260375191, 1.32195281393, -0.165244101741,
                  1.96337489196, -0.763534680208, -0.872611063095, 0.872611063095, 0.0409036435826},
                 {1.03959615353, 0.926217119987, -0.909101172609, 3.10167251322, -0.519798076765,
                  0.254035855574, -0.412621323928, -0.278433619937, 0.0846786185248, 0.324179428115},
                 {1.0951092353, 2.8414177131, 1.0951092353, 1.37649100537, 0.274863660432}}};
  for (const auto& [kind, y, dx, dw] : golden) {
    INFO(kind.name);
    Leaf leaf({2, 5}, x), w({5}, {1.5f, -0.5f, 1, 2, 0.75f}), b({5}, {0.25f, 0, -1, 0.5f, 0.125f});
    const Variable out = kind.apply(leaf.variable(), w.variable(), b.variable());
    check_close("y", values_of(out), y, Array(y.size(), 4), 1e-6);
    backward(weighted_sum(out, dy));
    check_close("dx", leaf.gradient(), dx, Array(dx.size(), 4), 1e-6);
    check_close("dw", w.gradient(), dw, Array(dw.size(), 4), 1e-6);
    if (kind.bias) check_close("db", b.gradient(), {1.5, 1, -0.5, 2.125, 0}, Array(5, 4), 1e-6);
  }
}

TEST_CASE("a mean far from zero leaves layer_norm's digits; constant rows give the bias") {
  const OnDevice device;
  const std::int64_t rows = 4, width = 200;
  std::vector<float> values = random_values(rows * width, 1), moved;
  for (float& v : values) v = std::round(v * 64) / 64;
  for (const float v : values) moved.push_back(v + 4096);
  const std::vector<float> ones(static_cast<std::size_t>(width), 1.0f), bias = random_values(width, 2);
  const Variable w(Tensor::from(ones, {width}, test_device())), b(Tensor::from(bias, {width}, test_device()));
  const auto norm = [&](const std::vector<float>& x) {
    return values_of(layer_norm(Variable(Tensor::from(x, {rows, width}, test_device())), w, b));
  };
  // The mean, of about 4096, is off by up to 2^-11. Differences of squares would lose all digits.
  check_close("y", norm(moved), as_double(norm(values)), Array(values.size(), 1), 2e-3);
  const auto constant = norm(std::vector<float>(values.size(), 3.0f));
  for (std::size_t i = 0; i < constant.size(); ++i) CHECK(constant[i] == bias[i % std::size_t(width)]);
}

TEST_CASE("a NaN or an infinity in a row makes that row NaN and no other") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const NormKind& kind : kKinds)
    for (const float bad : {std::nanf(""), INFINITY}) {
      std::vector<float> values = random_values(3 * 21, 1);
      values[21 + 20] = bad;
      Leaf w({21}, random_values(21, 2, 1)), b({21}, random_values(21, 3));
      const Variable x(Tensor::from(values, {3, 21}, test_device()));
      const auto y = values_of(kind.apply(activation(x), w.variable(), b.variable()));
      for (std::size_t i = 0; i < y.size(); ++i) {
        // x / infinity is 0 in rms_norm; the infinity itself is NaN there.
        const bool spoilt = i / 21 == 1 && (kind.centred || std::isnan(bad) || i == 41);
        CHECK(std::isnan(y[i]) == spoilt);
      }
    }
}

TEST_CASE("add_layer_norm and add_rms_norm have the bits of an add and a norm, gradients too") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const NormKind& kind : kKinds)
    for (const std::int64_t width : {7, 48, 129}) {
      INFO(kind.name << " of width " << width);
      const std::int64_t rows = 21;
      const auto ds = random_activations(rows * width, 5), dy = random_activations(rows * width, 6);
      const auto run = [&](bool fused, bool uses_sum) {
        Leaf x({rows, width}, random_values(rows * width, 1)),
            branch({rows, width}, random_values(rows * width, 2)), w({width}, random_values(width, 3, 1)),
            b({width}, random_values(width, 4));
        const Variable left = activation(x.variable()), right = activation(branch.variable());
        SumAndNorm both;
        if (fused) {
          both = kind.add_and_apply(left, right, w.variable(), b.variable());
        } else {
          both.sum = add(left, right);
          both.norm = kind.apply(both.sum, w.variable(), b.variable());
        }
        std::vector<std::vector<float>> all{values_of(both.sum), values_of(both.norm)};
        if (uses_sum)
          backward_from({{both.norm, dy}, {both.sum, ds}});  // the norm adds to what is there
        else
          backward(weighted_sum(both.norm, dy));
        for (const Leaf* leaf : {&x, &branch, &w}) all.push_back(leaf->gradient());
        if (kind.bias) all.push_back(b.gradient());
        return all;
      };
      for (const bool uses_sum : {true, false}) {
        const auto fused = run(true, uses_sum), apart = run(false, uses_sum);
        for (std::size_t i = 0; i < fused.size(); ++i) CHECK(same_bits(fused[i], apart[i]));
      }
      // What comes to the sum from elsewhere is added to what the norm gives it.
      // Both were rounded where activations are.
      const Array of_norm = as_double(run(true, false)[2]);
      check_close("the sum's gradient", run(true, true)[2], reference::plus(of_norm, as_double(ds)),
                  reference::plus(reference::absolute(of_norm), reference::absolute(as_double(ds))),
                  2 * rounding(1e-6));
    }
}

TEST_CASE("gradients of a norm's parameters add up over two uses; constants get none") {
  const OnDevice device;
  const std::int64_t rows = 10, width = 24;
  const auto dy = random_values(rows * width, 5);
  const auto weight_gradients = [&](bool first, bool second) {
    Leaf w({width}, random_values(width, 3, 1)), b({width}, random_values(width, 4));
    std::vector<std::pair<Variable, std::vector<float>>> outputs;
    for (const std::uint32_t stream : {1u, 2u})
      if (stream == 1 ? first : second) {
        const Variable x(Tensor::from(random_values(rows * width, stream), {rows, width}, test_device()));
        outputs.emplace_back(layer_norm(x, w.variable(), b.variable()), dy);
      }
    backward_from(outputs);
    return std::vector{w.gradient(), b.gradient()};
  };
  const auto both = weight_gradients(true, true), one = weight_gradients(true, false),
             other = weight_gradients(false, true);
  for (std::size_t i = 0; i < both.size(); ++i) {
    const Array a = as_double(one[i]), c = as_double(other[i]);
    check_close("gradient", both[i], reference::plus(a, c),
                reference::plus(reference::absolute(a), Array(a.size(), 10)), 1e-6);
  }
  Leaf x({rows, width}, random_values(rows * width, 1));
  const Variable w(Tensor::from(random_values(width, 3, 1), {width}, test_device()));
  backward(weighted_sum(rms_norm(x.variable(), w), dy));
  const NormReference expected(false, rows, width, as_double(values_of(x.variable())),
                               as_double(random_values(width, 3, 1)), {}, as_double(dy));
  check_close("dx", x.gradient(), expected.dx, expected.dx_scale, 2e-6);
}

TEST_CASE("norms give the same bits for any number of threads, in fp32 and bfloat16") {
  for (const DType type : {DType::f32, DType::bf16})
    for (const NormKind& kind : kKinds)
      for (const std::int64_t rows : {3, 70, 1000})
        check_any_threads([&] { return norm_probe(kind, rows, 50, type); });
}

TEST_CASE("norms in bfloat16 on a CPU are those in fp32 of the rounded rows, rounded once") {
  const std::int64_t rows = 9, width = 83;
  for (const NormKind& kind : kKinds) {
    const Probe narrow = norm_probe(kind, rows, width, DType::bf16),
                wide = norm_probe(kind, rows, width, DType::f32);
    CHECK(same_bits(narrow.value, rounded_to(DType::bf16, wide.value)));
    REQUIRE(narrow.gradients.size() == wide.gradients.size());
    CHECK(same_bits(narrow.gradients[0], rounded_to(DType::bf16, wide.gradients[0])));
    CHECK(same_bits(narrow.gradients[1], wide.gradients[1]));
    if (kind.bias) CHECK(same_bits(narrow.gradients[2], wide.gradients[2]));
  }
}

TEST_CASE("norms refuse shapes that do not fit") {
  const auto zeros = [](const Shape& shape) { return Variable(Tensor::zeros(shape)); };
  CHECK_THROWS_AS(layer_norm(zeros({2, 3}), zeros({2}), {}), Error);
  CHECK_THROWS_AS(layer_norm(zeros({2, 3}), zeros({3}), zeros({2})), Error);
  CHECK_THROWS_AS(layer_norm(zeros({2, 3, 1, 1}), zeros({3}), {}), Error);
  CHECK_THROWS_AS(rms_norm(zeros({2, 3}), zeros({3, 1})), Error);
  CHECK_THROWS_AS(rms_norm(zeros({2, 3}), zeros({3}), -1.0f), Error);
  CHECK_THROWS_AS(add_rms_norm(zeros({2, 3}), zeros({3, 3}), zeros({3})), Error);
}
