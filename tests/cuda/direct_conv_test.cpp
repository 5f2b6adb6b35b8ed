// The convolution by its definition on a GPU, against the formula in float64.
#include "nn/ops/cuda/direct_conv.h"
#include "tests/cuda/device_vector.h"
#include "tests/support/conv_case.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

Tensor on_gpu_as_activation(const std::vector<float>& values, const Shape& shape) {
  return in_form(Tensor::from(values, shape, test_device()), Layout::nhwc, activation_type());
}
std::vector<float> plus(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> sum = a;
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] += b[i];
  return sum;
}

void check_direct(const Conv& g) {
  INFO(g.str());
  const ConvGeometry geometry = g.geometry();
  const Shape x_shape{g.n, g.in, g.height, g.width}, y_shape = geometry.output_shape(x_shape);
  const auto xs = random_activations(g.x_size(), 1), dys = random_activations(g.y_size(), 3),
             old_dx = random_activations(g.x_size(), 4), ws = random_values(g.w_size(), 2),
             old_dw = random_values(g.w_size(), 5);
  const Array rx = as_double(xs), rw = as_double(rounded_to(activation_type(), ws)), rdy = as_double(dys);
  const Tensor x = on_gpu_as_activation(xs, x_shape), dy = on_gpu_as_activation(dys, y_shape),
               filter = cuda::direct_conv_filter(
                   geometry, Tensor::from(ws, geometry.weight_shape(), test_device()), x.dtype());

  Tensor y = Tensor::empty_like(dy);
  cuda::direct_conv(geometry, x, filter, y);
  check_close("y", values_of(Variable(y)), reference::conv2d(g, rx, rw),
              reference::conv2d(g, absolute(rx), absolute(rw)), rounding(1e-6));

  // Written, and added to what is there.
  const Array dx = conv2d_input_gradient(g, rw, rdy),
              dx_scale = conv2d_input_gradient(g, absolute(rw), absolute(rdy));
  InputGradient gradient{Tensor::empty_like(x), false};
  cuda::direct_conv_input_gradient(geometry, filter, dy, gradient);
  check_close("dx", values_of(Variable(gradient.tensor)), dx, dx_scale, rounding(1e-6));
  gradient = {on_gpu_as_activation(old_dx, x_shape), true};
  cuda::direct_conv_input_gradient(geometry, filter, dy, gradient);
  check_close("dx added", values_of(Variable(gradient.tensor)), reference::plus(as_double(old_dx), dx),
              reference::plus(absolute(as_double(old_dx)), dx_scale), rounding(1e-6));

  // Of bfloat16 activations too in fp32.
  const DeviceVector<float> dw(old_dw);
  cuda::direct_conv_weight_gradient(geometry, x, dy, {dw.data(), false});
  const auto written = dw.host();
  check_close("dw", written, conv2d_weight_gradient(g, rx, rdy),
              conv2d_weight_gradient(g, absolute(rx), absolute(rdy)), 1e-6);
  cuda::direct_conv_weight_gradient(geometry, x, dy, {dw.data(), true});
  CHECK(dw.host() == plus(written, written));
}

}  // namespace

TEST_CASE("the direct convolution agrees with the formula for any channels, groups, strides and padding") {
  const OnDevice gpu(GENERATE(from_range(activation_types())));
  for (const Conv& g : {Conv{2, 3, 8, 7, 5, 3, 1, 1},
                        {2, 3, 11, 9, 7, 7, 2, 3},
                        {1, 1, 1, 1, 1, 3, 1, 1},
                        {2, 4, 9, 8, 6, {3, 2}, {2, 1}, {0, 1}},
                        {2, 6, 9, 8, 8, {1, 7}, {1, 3}, {0, 3}},
                        {2, 6, 5, 6, 9, 3, 1, 1, 3},
                        {2, 8, 5, 6, 8, 1, 1, 0, 2},
                        {2, 9, 7, 6, 9, 3, 2, 1, 9},
                        {2, 5, 7, 6, 10, 3, 1, 1, 5},  // depthwise, two outputs to an input
                        {1, 64, 11, 3, 64, 3, 1, 1}})  // slabs of several rows, and one of fewer
    check_direct(g);
}
