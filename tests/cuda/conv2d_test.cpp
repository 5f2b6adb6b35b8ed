// conv2d on a GPU against the definition in float64, and against the CPU.
#include "nn/ops/ops.h"

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using reference::absolute;
using reference::Conv;
using testing::backward_from;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::GpuLeaf;
using testing::rounded_to;

// Rounding to bfloat16 is an error of at most 2^-8.
constexpr double kBf16 = 1.01 / 256, kFp32 = 2e-5;

ConvGeometry geometry(const Conv& g) {
  return g.geometry();
}

void check_case(const Conv& g, cuda::Precision precision, bool with_bias, bool deterministic = true) {
  OnGpu gpu(precision, deterministic);
  const DType type = gpu.context().activation_type();
  const bool bf16 = type == DType::bf16;
  INFO(g.str() << (bf16 ? ", bf16" : "") << (with_bias ? ", bias" : ""));
  const auto xs = rounded_to(type, random_values(g.x_size(), 1)), ws = random_values(g.w_size(), 2),
             bs = random_values(g.out, 3), dys = rounded_to(type, random_values(g.y_size(), 4));
  const CaughtInput x(gpu_tensor(xs, {g.n, g.in, g.height, g.width}, Layout::nhwc, type));
  const GpuLeaf w(geometry(g).weight_shape(), ws), b({g.out}, bs);
  const Variable y = conv2d(x.variable(), w.variable(), with_bias ? b.variable() : Variable(), geometry(g));
  REQUIRE(y.shape() == Shape({g.n, g.out, g.out_height(), g.out_width()}));
  REQUIRE(y.value().layout() == Layout::nhwc);
  REQUIRE(y.value().dtype() == type);
  backward_from({{y, dys}});

  const Array rx = as_double(xs), rw = as_double(rounded_to(type, ws)), rb = as_double(bs),
              rdy = as_double(dys);
  const reference::Images out{g.n, g.out, g.out_height() * g.out_width()};
  Array ry = reference::conv2d(g, rx, rw), ry_scale = reference::conv2d(g, absolute(rx), absolute(rw));
  if (with_bias) ry = add_bias(out, ry, rb), ry_scale = add_bias(out, ry_scale, absolute(rb));
  // A bias is added to what is rounded already.
  check_close("y", testing::values_of(y.value()), ry, ry_scale, bf16 ? (with_bias ? 2 : 1) * kBf16 : kFp32);
  check_close("dx", x.gradient(), conv2d_input_gradient(g, rw, rdy),
              conv2d_input_gradient(g, absolute(rw), absolute(rdy)), bf16 ? kBf16 : kFp32);
  // cuDNN rounds the weight's gradient to its inputs' type; the matrix product that is a 1x1 convolution does not.
  const bool rounded = bf16 && !(g.kernel == 1 && g.stride == 1 && g.padding == 0 && g.groups == 1);
  check_close("dw", w.gradient(), conv2d_weight_gradient(g, rx, rdy),
              conv2d_weight_gradient(g, absolute(rx), absolute(rdy)), rounded ? kBf16 : kFp32);
  if (with_bias)
    check_close("db", b.gradient(), channel_sums(out, rdy), channel_sums(out, absolute(rdy)), kFp32);
}

const std::vector<Conv>& cases() {
  static const std::vector<Conv> list{
      {2, 3, 11, 9, 16, 7, 2, 3},  // an odd stem
      {2, 3, 8, 8, 5, 3, 1, 1},
      {1, 5, 7, 5, 16, 3, 1, 1},
      {2, 16, 5, 6, 5, 3, 2, 1},
      {3, 16, 7, 7, 16, 3, 2, 1},
      {2, 5, 6, 5, 3, 1, 1, 0},
      {2, 16, 4, 4, 40, 1, 1, 0},
      {2, 16, 7, 7, 5, 1, 2, 0},
      {1, 6, 9, 8, 16, 5, 1, 0},
      {1, 1, 1, 1, 1, 3, 1, 1},
      {9, 5, 8, 8, 33, 1, 1, 0},  // more than one slab of rows for the bias
      {2, 6, 9, 8, 8, {1, 7}, 1, {0, 3}},
      {2, 4, 9, 8, 6, {3, 2}, {2, 1}, {0, 1}},
      {2, 6, 5, 6, 9, 3, 1, 1, 3},
      {2, 8, 5, 6, 8, 1, 1, 0, 2},  // no product of matrices: it has groups
      {2, 24, 7, 6, 24, 3, 2, 1, 24},
  };
  return list;
}

}  // namespace

TEST_CASE("conv2d on a GPU agrees with the formula") {
  for (const bool bias : {false, true})
    for (const Conv& g : cases()) check_case(g, cuda::Precision::fp32, bias);
}

TEST_CASE("conv2d on a GPU agrees with the formula where its algorithm is chosen by timing") {
  for (const Conv& g : cases()) check_case(g, cuda::Precision::fp32, true, false);
}

TEST_CASE("conv2d on a GPU in bfloat16 stays within the roundings of its results") {
  for (const bool bias : {false, true})
    for (const Conv& g : cases()) check_case(g, cuda::Precision::bf16, bias);
}

TEST_CASE("conv2d on a GPU gives what the CPU gives") {
  const Conv g{2, 16, 7, 9, 16, 3, 1, 1};
  const auto xs = random_values(g.x_size(), 1), ws = random_values(g.w_size(), 2),
             bs = random_values(g.out, 3), dys = random_values(g.y_size(), 4);
  Leaf cpu_x({g.n, g.in, g.height, g.width}, xs), cpu_w(geometry(g).weight_shape(), ws), cpu_b({g.out}, bs);
  const Variable cpu_y = conv2d(cpu_x.variable(), cpu_w.variable(), cpu_b.variable(), geometry(g));
  backward(weighted_sum(cpu_y, dys));

  const OnGpu gpu;
  const CaughtInput x(gpu_tensor(xs, {g.n, g.in, g.height, g.width}, Layout::nhwc, DType::f32));
  const GpuLeaf w(geometry(g).weight_shape(), ws), b({g.out}, bs);
  const Variable y = conv2d(x.variable(), w.variable(), b.variable(), geometry(g));
  backward_from({{y, dys}});
  const auto same = [](const char* what, const std::vector<float>& a, const std::vector<float>& b,
                       double scale) { check_close(what, a, as_double(b), Array(b.size(), scale), 1e-5); };
  same("y", testing::values_of(y.value()), testing::values_of(cpu_y), 12);  // of 144 terms
  same("dx", x.gradient(), cpu_x.gradient(), 12);
  same("dw", w.gradient(), cpu_w.gradient(), 12);
  same("db", b.gradient(), cpu_b.gradient(), 12);
}

TEST_CASE("two uses of one convolution's weight, and of its input, add up on a GPU") {
  for (const Conv& g :
       {Conv{2, 5, 6, 5, 16, 3, 1, 1}, Conv{2, 5, 6, 5, 16, 1, 1, 0}, Conv{2, 8, 6, 5, 8, 3, 1, 1, 8}})
    for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
      OnGpu gpu(precision);
      const DType type = gpu.context().activation_type();
      const bool bf16 = type == DType::bf16;
      const auto xs = rounded_to(type, random_values(g.x_size(), 1)), ws = random_values(g.w_size(), 2),
                 dy1 = rounded_to(type, random_values(g.y_size(), 3)),
                 dy2 = rounded_to(type, random_values(g.y_size(), 4));
      const GpuLeaf w(geometry(g).weight_shape(), ws), b({g.out}, random_values(g.out, 5));
      const Array rx = as_double(xs), rw = as_double(rounded_to(type, ws)),
                  rdy = reference::plus(as_double(dy1), as_double(dy2)),
                  scale = reference::plus(absolute(as_double(dy1)), absolute(as_double(dy2)));
      for (int step = 0; step < 2; ++step) {  // the second overwrites the first
        w.clear(), b.clear();
        const CaughtInput x(gpu_tensor(xs, {g.n, g.in, g.height, g.width}, Layout::nhwc, type));
        const Variable y1 = conv2d(x.variable(), w.variable(), b.variable(), geometry(g)),
                       y2 = conv2d(x.variable(), w.variable(), b.variable(), geometry(g));
        backward_from({{y1, dy1}, {y2, dy2}});
        check_close("dx", x.gradient(), conv2d_input_gradient(g, rw, rdy),
                    conv2d_input_gradient(g, absolute(rw), scale), bf16 ? 2 * kBf16 : kFp32);
        check_close("dw", w.gradient(), conv2d_weight_gradient(g, rx, rdy),
                    conv2d_weight_gradient(g, absolute(rx), scale), bf16 ? kBf16 : kFp32);
        const reference::Images out{g.n, g.out, g.out_height() * g.out_width()};
        check_close("db", b.gradient(), channel_sums(out, rdy), channel_sums(out, scale), kFp32);
      }
    }
}

TEST_CASE("conv2d on a GPU gives the same bits in every deterministic run") {
  const Conv g{3, 16, 9, 9, 24, 3, 1, 1};
  const auto run = [&] {
    const OnGpu gpu;
    const CaughtInput x(
        gpu_tensor(random_values(g.x_size(), 1), {g.n, g.in, g.height, g.width}, Layout::nhwc, DType::f32));
    const GpuLeaf w(geometry(g).weight_shape(), random_values(g.w_size(), 2)),
        b({g.out}, random_values(g.out, 3));
    const Variable y = conv2d(x.variable(), w.variable(), b.variable(), geometry(g));
    backward_from({{y, random_values(g.y_size(), 4)}});
    return std::vector{testing::values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
  };
  CHECK(run() == run());
}

TEST_CASE("a convolution's gradients that are not wanted are left out on a GPU") {
  const OnGpu gpu;
  const Conv g{1, 3, 5, 5, 4, 3, 1, 1};
  const Tensor images = gpu_tensor(random_values(g.x_size(), 1), {1, 3, 5, 5}, Layout::nhwc, DType::f32);
  const GpuLeaf w(geometry(g).weight_shape(), random_values(g.w_size(), 2));
  const auto dys = random_values(g.y_size(), 4);
  const Variable y = conv2d(Variable(images), w.variable(), Variable(), geometry(g));
  backward_from({{y, dys}});
  check_close("dw", w.gradient(),
              conv2d_weight_gradient(g, as_double(random_values(g.x_size(), 1)), as_double(dys)),
              Array(static_cast<std::size_t>(g.w_size()), 10.0), kFp32);
}

}  // namespace topknot
