#include "nn/ops/embedding.h"

#include <fmt/format.h>

namespace topknot {

Variable embedding(const Variable& ids, const Variable& weight) {
  const Shape &in = ids.shape(), &w = weight.shape();
  TOPKNOT_CHECK(in.rank() == 4 && in[2] == 1 && in[3] == 1 && w.rank() == 2 && in.numel() > 0,
                fmt::format("embedding: ids {}, weight {}", in.str(), w.str()));
  TOPKNOT_CHECK(ids.value().dtype() == DType::f32, "embedding: bfloat16 cannot hold all ids");
  const auto& kernels = kernels_for<EmbeddingKernels>(ids);
  return {"embedding", kernels.forward(ids.value(), weight.value()), {weight}, [=, &kernels](Tensor dy) {
            kernels.backward(ids.value(), dy, weight.shape()[0], weight.gradient_target());
          }};
}

}  // namespace topknot
