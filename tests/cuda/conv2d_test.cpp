// conv2d on a GPU against the definition in float64.
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
              Array(static_cast<std::size_t>(g.w_size()), 10.0), 2e-5);
}
