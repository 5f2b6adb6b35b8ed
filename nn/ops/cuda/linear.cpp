// nn/ops/linear.h on a GPU: three products by cuBLAS. Under bf16 the weight is rounded to bfloat16 for the products
// of the step; its gradient is summed, and kept, in fp32.
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/channel_bias.h"
#include "nn/ops/cuda/gemm.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {

Variable linear(const Variable& x, const Variable& weight, const Variable& bias) {
  const std::int64_t n = x.shape()[0], features = x.shape()[1], out = weight.shape()[0];
  const DType type = x.value().dtype();
  Context& context = Context::current();
  const Tensor w = weight_as(type, weight.value());
  Tensor y = Tensor::empty({n, out}, Layout::plain, x.value().device(), type);
  multiply(context, n, out, features, type, {x.value().data(), false}, {w.data(), true}, 0.0f, y.data(),
           type);
  if (bias.defined()) add_bias(y, bias);

  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"linear", y, std::move(inputs), [=](Tensor grad) {  // dW = dy^T x;  dx = dy W;  db = sum_n dy
            Context& context = Context::current();
            if (bias.defined()) bias_gradient(grad, bias);
            if (const GradientTarget dw = weight.gradient_target(); dw.data)
              multiply(context, out, features, n, type, {grad.data(), true}, {x.value().data(), false},
                       dw.accumulate ? 1.0f : 0.0f, dw.data, DType::f32);
            InputGradient dx = x.input_gradient();
            if (!dx.tensor.defined()) return;
            multiply(context, n, features, out, type, {grad.data(), false}, {w.data(), false},
                     dx.accumulate ? 1.0f : 0.0f, dx.tensor.data(), type);
            x.accumulate_grad(std::move(dx.tensor));
          }};
}

}  // namespace topknot::cuda
