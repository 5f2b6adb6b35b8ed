#include "nn/ops/linear.h"

#include "nn/core/base/check.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {

Variable linear(const Variable& x, const Variable& weight, const Variable& bias) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(in.rank() == 2 && w.rank() == 2 && in[1] == w[1],
                "linear: input " + in.str() + ", weight " + w.str());
  const std::int64_t n = in[0], features = in[1], out = w[0];
  if (on_gpu(x)) return cuda::linear(x, weight, bias);

  Tensor y = Tensor::empty({n, out});
  if (bias.defined())
    for (std::int64_t i = 0; i < n; ++i)
      std::copy(bias.value().data(), bias.value().data() + out, y.data() + i * out);
  matmul(false, true, n, out, features, x.value().data(), weight.value().data(), bias.defined() ? 1.0f : 0.0f,
         y.data());

  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"linear", y, std::move(inputs), [=](Tensor grad) {  // dW = dy^T x;  dx = dy W;  db = sum_n dy
            if (bias.defined()) {
              Tensor db = Tensor::zeros({out});
              for (std::int64_t i = 0; i < n; ++i)
                for (std::int64_t o = 0; o < out; ++o) db.data()[o] += grad.data()[i * out + o];
              bias.accumulate_grad(std::move(db));
            }
            if (weight.requires_grad()) {
              const GradientTarget dw = weight.gradient_target();
              matmul(true, false, out, features, n, grad.data(), x.value().data(),
                     dw.accumulate ? 1.0f : 0.0f, dw.data);
            }
            if (!x.requires_grad()) return;
            Tensor dx = Tensor::empty(x.shape());
            matmul(false, false, n, features, out, grad.data(), weight.value().data(), 0.0f, dx.data());
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot
