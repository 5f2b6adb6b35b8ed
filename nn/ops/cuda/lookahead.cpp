#include "nn/ops/lookahead.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/lookahead_kernels.h"

namespace topknot::cuda {
namespace {

LookaheadShape lookahead_shape(const Tensor& x, const Tensor& weight) {
  return {x.dim(0), weight.dim(0), weight.dim(1), x.dtype() == DType::bf16};
}

void filter(const Tensor& x, const Tensor& weight, std::int64_t shift, Tensor& y) {
  lookahead_filter(Context::current().stream(), lookahead_shape(x, weight), x.data(), weight.data(), shift,
                   y.data());
}

void weight_gradient(const Tensor& x, const Tensor& dy, std::int64_t batch, Tensor& dw) {
  lookahead_weight_gradient(Context::current().stream(), lookahead_shape(x, dw), x.data(), dy.data(), batch,
                            dw.data());
}

const RegisterKernels<LookaheadKernels> lookahead_registered(DeviceKind::cuda,
                                                             {.filter = filter,
                                                              .weight_gradient = weight_gradient});

}  // namespace
}  // namespace topknot::cuda
