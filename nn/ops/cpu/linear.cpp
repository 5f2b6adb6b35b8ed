// The fully connected layer by oneDNN's sgemm.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include "nn/ops/linear.h"

namespace topknot {
namespace {

// c (m x n) = op(a) op(b) + beta c, row-major, where op transposes if asked.
void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
            const float* a, const float* b, float beta, float* c) {
  const auto status = dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a,
                                 transpose_a ? m : k, b, transpose_b ? k : n, beta, c, n);
  TOPKNOT_CHECK(status == dnnl_success,
                fmt::format("oneDNN sgemm failed, status {}", static_cast<int>(status)));
}

OpState forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  if (bias.defined())
    for (std::int64_t i = 0; i < n; ++i) std::copy(bias.data(), bias.data() + out, y.data() + i * out);
  matmul(false, true, n, out, features, x.data(), weight.data(), bias.defined() ? 1.0f : 0.0f, y.data());
  return nullptr;
}

void backward(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState&,
              WeightedGradients& to) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  if (to.bias.data) {
    Tensor db = Tensor::zeros({out});
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t o = 0; o < out; ++o) db.data()[o] += dy.data()[i * out + o];
    write_gradient(to.bias, db);
  }
  if (to.weight.data)
    matmul(true, false, out, features, n, dy.data(), x.data(), to.weight.accumulate ? 1.0f : 0.0f,
           to.weight.data);
  if (to.x.tensor.defined())
    write_or_add(to.x, [&](Tensor& dx) {
      matmul(false, false, n, features, out, dy.data(), weight.data(), 0.0f, dx.data());
    });
}

const RegisterKernels<LinearKernels> linear_registered(DeviceKind::cpu,
                                                       {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
