#include "nn/ops/conv2d.h"

#include "nn/core/base/check.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {

std::shared_ptr<ConvKernels> make_conv_kernels(const ConvGeometry& geometry, Device device) {
  TOPKNOT_CHECK(geometry.in > 0 && geometry.out > 0 && geometry.kernel > 0 && geometry.stride > 0 &&
                    geometry.padding >= 0,
                "conv2d: channels, kernel and stride must be positive");
  TOPKNOT_CHECK(device.kind == DeviceKind::cpu,
                "conv2d has no kernels for " + device.str() + " in this build");
  return make_conv_kernels_cpu(geometry);
}

Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias, const ConvGeometry& geometry,
                const std::shared_ptr<ConvKernels>& kernels) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 4 && in[1] == geometry.in,
                "conv2d: input " + in.str() + " for " + std::to_string(geometry.in) + " input channels");
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv2d: weight " + weight.shape().str());
  const Shape out = geometry.output_shape(in);
  TOPKNOT_CHECK(out[2] > 0 && out[3] > 0, "conv2d: a kernel larger than the padded input " + in.str());

  if (on_gpu(x)) return cuda::conv2d(x, weight, bias, geometry);

  Tensor y = Tensor::empty(out, kernels->output_layout());
  ConvKernels::ChunkFn add_bias;
  if (bias.defined())
    add_bias = [&](std::int64_t begin, std::int64_t end) {
      add_channel_bias(y, bias.value().data(), begin, end);
    };
  kernels->forward(x.value(), weight.value().data(), y, add_bias);

  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"conv2d", y, std::move(inputs), [=](Tensor grad) {
            // dw[o,c,p,q] = sum_{n,i,j} dy[n,o,i,j] x[n,c,i*s+p-pad,j*s+q-pad];  dx = the transposed
            // convolution of dy; db[o] = sum_{n,i,j} dy[n,o,i,j]
            if (bias.defined()) bias.accumulate_grad(sum_over_channels(grad));
            InputGradient dx = x.input_gradient();
            kernels->backward(x.value(), weight.value().data(), grad, {}, weight.gradient_target(), dx);
            x.accumulate_grad(std::move(dx.tensor));
          }};
}

}  // namespace topknot
