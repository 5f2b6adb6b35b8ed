#include "nn/core/pass_cost.h"
#include "tests/support/any_threads.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;
using reference::matmul;
using reference::transpose;

namespace {

struct Case {
  std::int64_t n, width, classes, chunk;
  float smoothing;
};

std::vector<std::int32_t> labels_of(const Case& c, bool masked) {
  std::vector<std::int32_t> labels;
  for (std::int64_t i = 0; i < c.n; ++i)
    labels.push_back(masked && i % 3 == 1 ? kNoLabel : std::int32_t(i * i * 7 % c.classes));
  return labels;
}

struct Result {
  float loss;
  std::vector<float> dx, dw;
  bool operator==(const Result&) const = default;
};
Result run(const Case& c, const std::vector<float>& x, const std::vector<float>& w,
           const std::vector<std::int32_t>& labels, float scale = 1) {
  const Leaf input({c.n, c.width}, x), weight({c.classes, c.width}, w);
  const DeviceNumbers on_device(labels);
  const Variable loss =
      linear_cross_entropy(activation(input.variable()), weight.variable(), on_device, c.smoothing, c.chunk);
  CHECK(loss.shape() == Shape({1}));
  CHECK(loss.value().dtype() == DType::f32);
  const float value = loss.value().to_vector()[0];
  backward(loss, {}, scale);
  return {value, input.gradient(), weight.gradient()};
}

}  // namespace

TEST_CASE("linear_cross_entropy agrees with the formula: chunks, masked rows, smoothed labels, scales") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const bool half = activation_type() == DType::bf16;
  for (const bool masked : {false, true})
    for (const float scale : {1.0f, 0.25f})
      for (const Case& c : {Case{1, 1, 1, 0, 0}, Case{1, 5, 3, 0, 0}, Case{7, 8, 65, 3, 0},
                            Case{12, 33, 65, 5, 0.1f}, Case{40, 16, 700, 16, 0}, Case{9, 24, 2100, 9, 0.3f},
                            Case{600, 9, 70, 256, 0}, Case{5, 8, 64, 2, 0}}) {
        INFO(c.n << " rows of " << c.width << ", " << c.classes << " classes, chunks of " << c.chunk
                 << ", smoothing " << c.smoothing << (masked ? ", masked" : "") << ", scale " << scale);
        const auto x = random_activations(c.n * c.width, 1), w = random_values(c.classes * c.width, 2);
        const auto labels = labels_of(c, masked);
        const Result result = run(c, x, w, labels, scale);
        const Array rx = as_double(x), rw = as_double(rounded_to(activation_type(), w));
        Array dz, dz_scale;
        const double expected = reference::softmax_cross_entropy(
            c.n, c.classes, matmul(c.n, c.classes, c.width, rx, transpose(c.classes, c.width, rw)), labels,
            dz, c.smoothing, &dz_scale);
        for (double& v : dz) v *= scale;
        for (double& v : dz_scale) v *= scale;
        CHECK(result.loss == Approx(expected).epsilon(2e-5).margin(2e-5));
        // dz is rounded to bfloat16 before the products, dx after them.
        check_close("dx", result.dx, matmul(c.n, c.width, c.classes, dz, rw),
                    matmul(c.n, c.width, c.classes, dz_scale, absolute(rw)), (half ? 2 : 1) * rounding(2e-5));
        check_close("dw", result.dw, matmul(c.classes, c.width, c.n, transpose(c.n, c.classes, dz), rx),
                    matmul(c.classes, c.width, c.n, transpose(c.n, c.classes, dz_scale), absolute(rx)),
                    rounding(2e-5));
      }
}

TEST_CASE("linear_cross_entropy has PyTorch's values: cross_entropy(x W^T, ignore_index, label_smoothing)") {
  const OnDevice device;
  const std::vector<float> x{0.5f, -1, 2, 0.25f, -0.75f, 1.5f}, w{1, -0.5f, 0.25f, 2, -1.5f, 0.75f, 0.5f, 1};
  const std::vector<std::int32_t> labels{1, 3, kNoLabel};
  // PyTorch 2.15.0 in float64.
  struct Golden {
    float smoothing;
    double loss;
    Array dx, dw;
  };
  for (const Golden& golden :
       {Golden{0,
               2.2226933723404754,
               {0.24758328013412995, -1.0578499244196147, 0.09620118228223543, -0.2767098521484609, 0, 0},
               {0.7003661301747997, -0.31728551297573526, -0.026712086000045182, 0.5050719713244699,
                0.020333540977937603, -0.030688882377707012, -0.6939875851526921, -0.15709757597102775}},
        Golden{0.1f,
               2.214099622340475,
               {0.2569582801341299, -0.9984749244196148, 0.11807618228223546, -0.26733485214846087, 0, 0},
               {0.6691161301747997, -0.30791051297573524, -0.03296208600004519, 0.46444697132447,
                -0.010916459022062402, -0.02131388237770701, -0.6252375851526922, -0.13522257597102774}}})
    for (const std::int64_t chunk : {0, 1, 2}) {
      const Result result = run({3, 2, 4, chunk, golden.smoothing}, x, w, labels);
      CHECK(result.loss == Approx(golden.loss).epsilon(1e-6));
      check_close("dx", result.dx, golden.dx, Array(6, 1.0), 5e-7);
      check_close("dw", result.dw, golden.dw, Array(8, 1.0), 5e-7);
    }
}

TEST_CASE("linear_cross_entropy adds to the gradient of a weight that an embedding shares") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const Case c{6, 8, 11, 4, 0};
  const auto w = random_values(c.classes * c.width, 2);
  const std::vector<float> ids = {0, 3, 10, 3, 7, 1};
  const auto labels = labels_of(c, false);
  const DeviceNumbers on_device(labels);
  const auto gradient = [&](bool fused) {
    const Leaf weight({c.classes, c.width}, w);
    for (int step = 0; step < 2; ++step) {  // the second overwrites the first
      weight.clear();
      const Variable x =
          in_form(embedding(Variable(Tensor::from(ids, {2, 3, 1, 1}, test_device())), weight.variable()),
                  Layout::plain, activation_type());
      backward(fused ? linear_cross_entropy(x, weight.variable(), on_device, 0, c.chunk)
                     : softmax_cross_entropy(linear(x, weight.variable(), {}), on_device));
    }
    return weight.gradient();
  };
  const Array apart = as_double(gradient(false));
  check_close("dw", gradient(true), apart, Array(apart.size(), 1.0), 4 * rounding(1e-5));
}

TEST_CASE("linear_cross_entropy: with no row to count the loss and all gradients are 0") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const Case c{5, 4, 7, 2, 0};
  const Result result = run(c, random_activations(20, 1), random_values(28, 2), std::vector(5, kNoLabel));
  CHECK(result.loss == 0);
  CHECK(result.dx == std::vector<float>(20, 0.0f));
  CHECK(result.dw == std::vector<float>(28, 0.0f));
}

TEST_CASE("linear_cross_entropy: a NaN in a row comes through to the loss and to its gradient") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const Case c{5, 4, 7, 2, 0};
  auto x = random_activations(20, 1);
  x[9] = std::nanf("");
  const Result result = run(c, x, random_values(28, 2), labels_of(c, false));
  CHECK(std::isnan(result.loss));
  CHECK(std::isnan(result.dx[8]));
  CHECK(std::isfinite(result.dx[0]));
}

// Its own loops have the same bits for any number; the products are oneDNN's, as those of linear().
TEST_CASE("linear_cross_entropy: any number of threads agrees within rounding, one number bit for bit") {
  for (const DType type : activation_types()) {
    const OnDevice device(type);
    if (on_gpu()) return;
    const Case c{150, 48, 1000, 64, 0};
    const auto x = random_activations(c.n * c.width, 1), w = random_values(c.classes * c.width, 2);
    const auto result = [&](int threads) {
      const Threads of(threads);
      return run(c, x, w, labels_of(c, true));
    };
    const Result one = result(1);
    CHECK(result(1) == one);
    for (const int threads : {2, 3}) {
      const Result other = result(threads);
      CHECK(result(threads) == other);
      CHECK(other.loss == Approx(one.loss).epsilon(1e-6));
      check_close("dx", other.dx, as_double(one.dx), Array(one.dx.size(), 0.1), rounding(1e-6));
      check_close("dw", other.dw, as_double(one.dw), Array(one.dw.size(), 0.1), rounding(1e-6));
    }
  }
}

TEST_CASE("linear_cross_entropy by single rows has the same bits for any number of threads") {
  const OnDevice device(DType::f32);
  if (on_gpu()) return;
  for (const std::int64_t n : {1, 3}) {
    const Case c{n, 64, 1000, 1, 0};
    const auto x = random_activations(c.n * c.width, 1), w = random_values(c.classes * c.width, 2);
    check_any_threads([&] { return run(c, x, w, labels_of(c, false)); });
  }
}

TEST_CASE("linear_cross_entropy keeps a chunk of logits, whatever the number of rows") {
  const std::int64_t width = 8, classes = 4096, chunk = 16;
  const auto peak = [&](std::int64_t n, bool gradients) {
    const Leaf x({n, width}, random_values(n * width, 1)),
        w({classes, width}, random_values(classes * width, 2));
    const std::vector<std::int32_t> labels(static_cast<std::size_t>(n), 3);
    const PassCost cost;
    const Variable input = gradients ? x.variable() : Variable(x.variable().value());
    const Variable weight = gradients ? w.variable() : Variable(w.variable().value());
    backward(linear_cross_entropy(input, weight, labels, 0, chunk));
    return cost.peak_bytes();
  };
  const std::int64_t logits = chunk * classes * 4;
  CHECK(peak(1024, false) < 2 * logits);
  CHECK(peak(1024, true) - peak(64, true) < 3 * (1024 - 64) * width * 4);  // x's gradient, kept and given
}

TEST_CASE("linear_cross_entropy refuses what does not fit") {
  const Variable x(Tensor::zeros({2, 3})), w(Tensor::zeros({5, 3}));
  const std::vector<std::int32_t> labels = {0, 4}, wrong = {0, 5};
  CHECK_NOTHROW(linear_cross_entropy(x, w, labels));
  CHECK_THROWS_AS(linear_cross_entropy(x, w, wrong), Error);
  CHECK_THROWS_AS(linear_cross_entropy(x, w, std::span(labels).first(1)), Error);
  CHECK_THROWS_AS(linear_cross_entropy(x, Variable(Tensor::zeros({5, 4})), labels), Error);
  CHECK_THROWS_AS(linear_cross_entropy(x, w, labels, 1.0f), Error);
  CHECK_THROWS_AS(linear_cross_entropy(x, w, labels, 0, -1), Error);
}
