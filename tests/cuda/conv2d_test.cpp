// Convolutions on a GPU: the op, layouts, kernels of our own, and cuDNN's graph API.
#include "nn/ops/cuda/cudnn_graph.h"
#include "nn/ops/cuda/products.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/conv_case.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

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

TEST_CASE("conv2d on a GPU agrees with the formula, in bfloat16 within the roundings of its results") {
  const OnDevice gpu(GENERATE(from_range(activation_types())));
  for (const bool bias : {false, true})
    for (const Conv& g : cases()) check_case({g, bias, Layout::nhwc});
}

TEST_CASE("conv2d on a GPU agrees with the formula where its algorithm is chosen by timing") {
  const OnDevice gpu(DType::f32, false);
  for (const Conv& g : cases()) check_case({g, true, Layout::nhwc});
}

TEST_CASE("two uses of one convolution's weight, and of its input, add up on a GPU") {
  const OnDevice gpu(GENERATE(from_range(activation_types())));
  for (const Conv& g :
       {Conv{2, 5, 6, 5, 16, 3, 1, 1}, Conv{2, 5, 6, 5, 16, 1, 1, 0}, Conv{2, 8, 6, 5, 8, 3, 1, 1, 8}}) {
    const auto dy1 = random_activations(g.y_size(), 3), dy2 = random_activations(g.y_size(), 4);
    const Leaf x({g.n, g.in, g.height, g.width}, random_activations(g.x_size(), 1)),
        w(g.geometry().weight_shape(), random_values(g.w_size(), 2)), b({g.out}, random_values(g.out, 5));
    const Array rx = as_double(values_of(x.variable())),
                rw = as_double(rounded_to(activation_type(), values_of(w.variable()))),
                rdy = reference::plus(as_double(dy1), as_double(dy2)),
                scale = reference::plus(absolute(as_double(dy1)), absolute(as_double(dy2)));
    for (int step = 0; step < 2; ++step) {  // the second overwrites the first
      x.clear(), w.clear(), b.clear();
      const Variable in = activation(x.variable(), Layout::nhwc);
      backward_from({{conv2d(in, w.variable(), b.variable(), g.geometry()), dy1},
                     {conv2d(in, w.variable(), b.variable(), g.geometry()), dy2}});
      check_close("dx", x.gradient(), conv2d_input_gradient(g, rw, rdy),
                  conv2d_input_gradient(g, absolute(rw), scale), 2 * rounding(1e-5));
      check_close("dw", w.gradient(), conv2d_weight_gradient(g, rx, rdy),
                  conv2d_weight_gradient(g, absolute(rx), scale), rounding(2e-5));
      const reference::Images out{g.n, g.out, g.out_height() * g.out_width()};
      check_close("db", b.gradient(), channel_sums(out, rdy), channel_sums(out, scale), 2e-5);
    }
  }
}

TEST_CASE("conv2d on a GPU gives the same bits in every deterministic run") {
  const Conv g{3, 16, 9, 9, 24, 3, 1, 1};
  const auto run = [&] {
    const OnDevice gpu;
    const Leaf x({g.n, g.in, g.height, g.width}, random_values(g.x_size(), 1)),
        w(g.geometry().weight_shape(), random_values(g.w_size(), 2)), b({g.out}, random_values(g.out, 3));
    const Variable y =
        conv2d(activation(x.variable(), Layout::nhwc), w.variable(), b.variable(), g.geometry());
    backward(weighted_sum(y, random_values(g.y_size(), 4)));
    return std::vector{values_of(y), x.gradient(), w.gradient(), b.gradient()};
  };
  CHECK(run() == run());
}

TEST_CASE("a convolution's gradients that are not wanted are left out on a GPU") {
  const OnDevice gpu;
  const Conv g{1, 3, 5, 5, 4, 3, 1, 1};
  const auto xs = random_values(g.x_size(), 1), dy = random_values(g.y_size(), 4);
  const Variable images(to_layout(Tensor::from(xs, {1, 3, 5, 5}, test_device()), Layout::nhwc));
  const Leaf w(g.geometry().weight_shape(), random_values(g.w_size(), 2));
  backward(weighted_sum(conv2d(images, w.variable(), Variable(), g.geometry()), dy));
  check_close("dw", w.gradient(), conv2d_weight_gradient(g, as_double(xs), as_double(dy)),
              Array(std::size_t(g.w_size()), 10.0), 2e-5);
}

namespace {

std::vector<float> floats(const std::vector<BFloat16>& values) {
  std::vector<float> out(values.size());
  to_float(values.data(), values.size(), out.data());
  return out;
}

}  // namespace

TEST_CASE("a bias is added to its channel") {
  const OnGpu gpu;
  for (const std::size_t channels : {1u, 3u, 10u, 64u, 257u, 1000u}) {
    const std::size_t rows = 17;
    const auto y = random_values(std::int64_t(rows * channels), 1),
               bias = random_values(std::int64_t(channels), 2);
    std::vector<float> expected = y, expected_half = rounded_to(DType::bf16, y);
    for (std::size_t i = 0; i < y.size(); ++i)
      expected[i] += bias[i % channels], expected_half[i] += bias[i % channels];
    const DeviceVector<float> on_gpu(y), b(bias);
    cuda::add_bias(gpu.stream(), on_gpu.data(), false, b.data(), rows, channels);
    CHECK(on_gpu.host() == expected);
    std::vector<BFloat16> half(y.size());
    to_bfloat16(y.data(), y.size(), half.data());
    const DeviceVector<BFloat16> half_on_gpu(half);
    cuda::add_bias(gpu.stream(), half_on_gpu.data(), true, b.data(), rows, channels);
    CHECK(floats(half_on_gpu.host()) == rounded_to(DType::bf16, expected_half));
  }
}

TEST_CASE("column sums are right for any number of rows and channels, and always the same bits") {
  const OnGpu gpu;
  struct Size {
    std::size_t rows, channels;
  };
  for (const Size s : {Size{1, 1}, {7, 3}, {255, 33}, {257, 16}, {1025, 100}, {300000, 2}}) {
    const auto n = std::int64_t(s.rows * s.channels);
    const auto x = rounded_to(DType::bf16, random_values(n, 1));  // the same sums of either type
    std::vector<double> sums(s.channels), scale(s.channels);
    for (std::size_t i = 0; i < x.size(); ++i)
      sums[i % s.channels] += double(x[i]), scale[i % s.channels] += std::abs(double(x[i]));
    std::vector<BFloat16> rounded(x.size());
    to_bfloat16(x.data(), x.size(), rounded.data());
    const DeviceVector<float> full(x), scratch(cuda::column_sums_scratch(s.rows, s.channels));
    const DeviceVector<BFloat16> half(rounded);
    const DeviceVector<float> out(std::vector<float>(s.channels, 3.0f));
    const auto run = [&](bool bf16, bool accumulate) {
      cuda::column_sums(gpu.stream(), bf16 ? static_cast<const void*>(half.data()) : full.data(), bf16,
                        s.rows, s.channels, scratch.data(), out.data(), accumulate);
      return out.host();
    };
    const auto first = run(false, false);
    check_close("sums", first, sums, scale, 1e-6);
    CHECK(run(true, false) == first);
    std::vector<float> twice = first;
    for (float& value : twice) value += value;
    CHECK(run(false, true) == twice);
  }
}

namespace {

using reference::Conv;

}  // namespace

TEST_CASE("plans of cuDNN's graph API give a weight gradient in fp32 from bfloat16") {
  OnGpu gpu(cuda::Precision::bf16);
  for (const Conv& g : {Conv{2, 8, 6, 5, 16, 3, 1, 1}, Conv{3, 16, 9, 9, 24, 1, 2, 0},
                        Conv{2, 8, 9, 8, 8, {3, 2}, {2, 1}, {0, 1}}}) {
    const auto x = rounded_to(DType::bf16, random_values(g.x_size(), 1)),
               dy = rounded_to(DType::bf16, random_values(g.y_size(), 2));
    const Shape shape{g.n, g.in, g.height, g.width};
    const Tensor on_gpu = gpu_tensor(x, shape, Layout::nhwc, DType::bf16),
                 gradient = gpu_tensor(dy, g.geometry().output_shape(shape), Layout::nhwc, DType::bf16);
    cuda::WeightGradientGraph graph(gpu.context().cudnn(), g.geometry(), shape);
    if (graph.plans() == 0) WARN("cuDNN " << cudnnGetVersion() << " has no plan for " << g.str());
    CHECK(graph.plan(graph.plans()) == nullptr);
    for (int i = 0; i < graph.plans(); ++i) {
      const cuda::WeightGradientPlan* plan = graph.plan(i);
      if (!plan) continue;
      INFO(g.str() << ", engine " << graph.engine(i));
      Tensor dw = Tensor::empty(g.geometry().weight_shape(), Layout::nhwc, gpu.device());
      REQUIRE(plan->run(gpu.context().cudnn(), on_gpu.data(), gradient.data(),
                        gpu.context().workspace(plan->workspace()), dw.data()) == CUDNN_STATUS_SUCCESS);
      const auto rx = as_double(x), rdy = as_double(dy);
      check_close("dw", values_of(dw), conv2d_weight_gradient(g, rx, rdy),
                  conv2d_weight_gradient(g, reference::absolute(rx), reference::absolute(rdy)), 2e-5);
    }
  }
}
