// Stands in for the CUDA ops in a build without CUDA, where no tensor is on a GPU.
#include "nn/core/base/check.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {
namespace {

[[noreturn]] void absent() {
  throw Error("an op on a GPU in a build without CUDA");
}

}  // namespace

Variable conv2d(const Variable&, const Variable&, const Variable&, const ConvGeometry&) {
  absent();
}
Variable linear(const Variable&, const Variable&, const Variable&) {
  absent();
}
Variable batch_norm(const Variable&, const Variable&, const Variable&, const Variable&, const BatchNormState&,
                    const BatchNormOptions&) {
  absent();
}
Variable pool(const Variable&, const PoolGeometry&) {
  absent();
}
Variable global_average_pool(const Variable&) {
  absent();
}
Variable softmax_cross_entropy(const Variable&, const std::int32_t*) {
  absent();
}
Variable mean_squared_error(const Variable&, const Tensor&) {
  absent();
}
void count_correct(const Tensor&, const std::int32_t*, double*) {
  absent();
}
Variable relu(const Variable&) {
  absent();
}
Variable add(const Variable&, const Variable&) {
  absent();
}
Variable dropout(const Variable&, float, const CounterRng&, const std::uint32_t*) {
  absent();
}
Variable subsample_and_pad(const Variable&, std::int64_t) {
  absent();
}
Variable flatten(const Variable&) {
  absent();
}
Tensor to_activation(const Tensor&) {
  absent();
}
Tensor to_plain(const Tensor&) {
  absent();
}

}  // namespace topknot::cuda
