#include "nn/ops/embedding.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/sequence_kernels.h"

namespace topknot::cuda {
namespace {

EmbeddingShape shape_of(const Tensor& ids, std::int64_t tokens, std::int64_t width) {
  const auto word = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  return {word(ids.dim(0)), word(ids.dim(1)), word(tokens), word(width)};
}

Tensor embedding_forward(const Tensor& ids, const Tensor& weight) {
  const Context& context = Context::current();
  Tensor y =
      Tensor::empty({ids.numel(), weight.dim(1)}, Layout::plain, context.device(), context.activation_type());
  embedding_rows(context.stream(), ids.data(), weight.data(), shape_of(ids, weight.dim(0), weight.dim(1)),
                 y.dtype() == DType::bf16, y.data());
  return y;
}

void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t tokens,
                        const GradientTarget& weight) {
  if (!weight.data) return;
  const Context& context = Context::current();
  const EmbeddingShape shape = shape_of(ids, tokens, dy.dim(1));
  if (!weight.accumulate)
    backend(context.device()).fill_zero(weight.data, static_cast<std::size_t>(tokens * dy.dim(1)));
  embedding_gradient(context.stream(), ids.data(), dy.data(), dy.dtype() == DType::bf16, shape, weight.data);
}

const RegisterKernels<EmbeddingKernels> embedding_registered(DeviceKind::cuda,
                                                             {.forward = embedding_forward,
                                                              .backward = embedding_backward});

}  // namespace
}  // namespace topknot::cuda
