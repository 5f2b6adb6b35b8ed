#pragma once
// Shared by attention's kernels on a GPU: float rows by attention.cu, bfloat16 by attention_bf16.cu.

#include <string>

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {

struct AttentionCall {
  std::int64_t heads, kv_heads, share, batch, steps, width;  // share: heads / kv_heads
  bool causal;
  float scale;

  explicit AttentionCall(const AttentionShape& s)
      : heads(s.heads),
        kv_heads(s.kv_heads),
        share(s.share()),
        batch(s.batch),
        steps(s.steps),
        width(s.width),
        causal(s.causal),
        scale(1 / std::sqrt(static_cast<float>(s.width))) {
    TOPKNOT_CHECK(width <= kWidestHeadOnGpu, "attention on a GPU takes heads of up to " +
                                                 std::to_string(kWidestHeadOnGpu) + " elements, not " +
                                                 std::to_string(width) + "; use more heads");
  }
  __host__ __device__ std::int64_t all_heads() const { return heads + 2 * kv_heads; }
};

// The rows of one head of one sequence, from token 0 on.
template <class T>
struct HeadRows {
  T* first;
  std::int64_t stride, steps;
  // Token t's; after the last one the last one's, for lanes and warps whose results are not used.
  __device__ T* row(std::int64_t t) const { return first + (t < steps ? t : steps - 1) * stride; }
};
template <class T>
__device__ HeadRows<T> head_rows(const AttentionCall& c, T* tensor, std::int64_t heads, std::int64_t b,
                                 std::int64_t head) {
  return {tensor + (b * heads + head) * c.width, c.batch * heads * c.width, c.steps};
}

// In bfloat16. log_sums and d, the sums of dy y over a row: [batch * heads, steps].
void attention_forward_bf16(const AttentionCall& call, const Tensor& qkv, Tensor& y, float* log_sums);
void attention_backward_bf16(const AttentionCall& call, const Tensor& qkv, const Tensor& dy,
                             const float* log_sums, const float* d, Tensor& dqkv);

}  // namespace topknot::cuda
