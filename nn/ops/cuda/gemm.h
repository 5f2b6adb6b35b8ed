#pragma once
// What linear layers and convolutions share on a GPU: products of row-major matrices by cuBLAS, and the bias.

#include <cstdint>

#include "nn/core/autograd.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

struct Operand {
  const void* data;
  bool transposed;  // stored as the transpose of what takes part in the product
};

// c = op(a) op(b) + beta c on the context's stream, where op(a) is [m, k], op(b) is [k, n] and c is [m, n], all
// contiguous and none of them empty. `inputs` is the type of a and b; c has it too, or is f32. Sums are in fp32, with
// the inputs' products in the precision that Context::options() states. Deterministic for a context's one stream.
// Throws Error for sizes of 2^31 and more.
void multiply(Context& context, std::int64_t m, std::int64_t n, std::int64_t k, DType inputs, Operand a,
              Operand b, float beta, void* c, DType output);

// A parameter's value as an operand of the given type: itself, or a converted copy.
Tensor weight_as(DType type, const Tensor& weight);

// y[..., c] += bias[c]. The channel is the fastest dimension of y in memory: nhwc, or [N, out].
void add_bias(Tensor& y, const Tensor& bias);
// The sum of the output's gradient over all but the channel, written or added to the bias' gradient; nothing where that
// is not wanted.
void bias_gradient(const Tensor& dy, const GradientTarget& target);

}  // namespace topknot::cuda
