// linear on a GPU against sums in float64, and against the CPU.
#include "nn/ops/ops.h"

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using reference::absolute;
using reference::transpose;
using testing::backward_from;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::GpuLeaf;
using testing::rounded_to;

struct Case {
  std::int64_t n, features, out;
};

void check_case(const Case& c, cuda::Precision precision, bool with_bias) {
  OnGpu gpu(precision);
  const DType type = gpu.context().activation_type();
  const bool bf16 = type == DType::bf16;
  INFO(c.n << " x " << c.features << " -> " << c.out << (bf16 ? ", bf16" : "")
           << (with_bias ? ", bias" : ""));
  const auto xs = rounded_to(type, random_values(c.n * c.features, 1)),
             ws = random_values(c.features * c.out, 2), bs = random_values(c.out, 3),
             dys = rounded_to(type, random_values(c.n * c.out, 4));
  const CaughtInput x(gpu_tensor(xs, {c.n, c.features}, Layout::plain, type));
  const GpuLeaf w({c.out, c.features}, ws), b({c.out}, bs);
  const Variable y = linear(x.variable(), w.variable(), with_bias ? b.variable() : Variable());
  REQUIRE(y.shape() == Shape({c.n, c.out}));
  REQUIRE(y.value().dtype() == type);
  backward_from({{y, dys}});

  const Array rx = as_double(xs), rw = as_double(rounded_to(type, ws)), rdy = as_double(dys);
  const auto forward = [&](const Array& p, const Array& q, const Array& bias) {
    Array sums = reference::matmul(c.n, c.out, c.features, p, transpose(c.out, c.features, q));
    for (std::size_t i = 0; with_bias && i < sums.size(); ++i) sums[i] += bias[i % bias.size()];
    return sums;
  };
  const Array rb = as_double(bs);
  // Rounding to bfloat16 is an error of at most 2^-8 of the result; a bias is added to what is rounded already.
  const double result = bf16 ? 1.01 / 256 : 1e-5;
  check_close("y", testing::values_of(y.value()), forward(rx, rw, rb),
              forward(absolute(rx), absolute(rw), absolute(rb)), bf16 && with_bias ? 2 * result : result);
  const auto dx = [&](const Array& p, const Array& q) {
    return reference::matmul(c.n, c.features, c.out, p, q);
  };
  check_close("dx", x.gradient(), dx(rdy, rw), dx(absolute(rdy), absolute(rw)), result);
  // The weight's gradient stays in fp32.
  const auto dw = [&](const Array& p, const Array& q) {
    return reference::matmul(c.out, c.features, c.n, transpose(c.n, c.out, p), q);
  };
  check_close("dw", w.gradient(), dw(rdy, rx), dw(absolute(rdy), absolute(rx)), 1e-5);
  if (!with_bias) return;
  const reference::Images columns{c.n, c.out, 1};
  check_close("db", b.gradient(), channel_sums(columns, rdy), channel_sums(columns, absolute(rdy)), 1e-5);
}

}  // namespace

TEST_CASE("linear on a GPU agrees with the formula") {
  for (const bool bias : {false, true})
    for (const Case& c : {Case{1, 1, 1}, {5, 7, 3}, {16, 33, 10}, {3, 64, 100}, {700, 5, 37}})
      check_case(c, cuda::Precision::fp32, bias);
}

TEST_CASE("linear on a GPU in bfloat16 sums in fp32 and keeps the weight's gradient so") {
  for (const Case& c : {Case{5, 7, 3}, {16, 32, 10}, {600, 16, 24}})
    check_case(c, cuda::Precision::bf16, true);
}

TEST_CASE("linear on a GPU gives what the CPU gives") {
  const std::int64_t n = 9, features = 21, out = 10;
  const auto xs = random_values(n * features, 1), ws = random_values(features * out, 2),
             bs = random_values(out, 3), dys = random_values(n * out, 4);
  Leaf cpu_x({n, features}, xs), cpu_w({out, features}, ws), cpu_b({out}, bs);
  const Variable cpu_y = linear(cpu_x.variable(), cpu_w.variable(), cpu_b.variable());
  backward(weighted_sum(cpu_y, dys));

  const OnGpu gpu;
  const CaughtInput x(gpu_tensor(xs, {n, features}, Layout::plain, DType::f32));
  const GpuLeaf w({out, features}, ws), b({out}, bs);
  const Variable y = linear(x.variable(), w.variable(), b.variable());
  backward_from({{y, dys}});
  const auto same = [](const char* what, const std::vector<float>& a, const std::vector<float>& b) {
    check_close(what, a, as_double(b), Array(b.size(), 1.0), 2e-5);
  };
  same("y", testing::values_of(y.value()), cpu_y.value().to_vector());
  same("dx", x.gradient(), cpu_x.gradient());
  same("dw", w.gradient(), cpu_w.gradient());
  same("db", b.gradient(), cpu_b.gradient());
}

TEST_CASE("two uses of one weight, and of one input, add up on a GPU") {
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
    OnGpu gpu(precision);
    const DType type = gpu.context().activation_type();
    const std::int64_t n = 4, features = 6, out = 5;
    const auto xs = rounded_to(type, random_values(n * features, 1)), ws = random_values(features * out, 2),
               dy1 = rounded_to(type, random_values(n * out, 3)),
               dy2 = rounded_to(type, random_values(n * out, 4));
    const GpuLeaf w({out, features}, ws), b({out}, random_values(out, 5));
    for (int step = 0; step < 2; ++step) {  // the second overwrites the first
      w.clear(), b.clear();
      const CaughtInput x(gpu_tensor(xs, {n, features}, Layout::plain, type));
      const Variable y1 = linear(x.variable(), w.variable(), b.variable()),
                     y2 = linear(x.variable(), w.variable(), b.variable());
      backward_from({{y1, dy1}, {y2, dy2}});
      const Array rx = as_double(xs), rw = as_double(rounded_to(type, ws)),
                  rdy = reference::plus(as_double(dy1), as_double(dy2)),
                  scale = reference::plus(absolute(as_double(dy1)), absolute(as_double(dy2)));
      check_close("dx", x.gradient(), reference::matmul(n, features, out, rdy, rw),
                  reference::matmul(n, features, out, scale, absolute(rw)),
                  type == DType::bf16 ? 1.0 / 128 : 1e-5);
      check_close("dw", w.gradient(), reference::matmul(out, features, n, transpose(n, out, rdy), rx),
                  reference::matmul(out, features, n, transpose(n, out, scale), absolute(rx)), 1e-5);
      const reference::Images columns{n, out, 1};
      check_close("db", b.gradient(), channel_sums(columns, rdy), channel_sums(columns, scale), 1e-5);
    }
  }
}

}  // namespace topknot
