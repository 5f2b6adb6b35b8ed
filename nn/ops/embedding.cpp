#include <fmt/format.h>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

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

namespace {

// The id of each row of the value.
std::vector<std::int64_t> ids_by_row(const Tensor& ids) {
  const std::int64_t batch = ids.dim(0), steps = ids.dim(1);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(ids.numel()));
  for (std::int64_t i = 0; i < ids.numel(); ++i)
    rows[static_cast<std::size_t>(i % steps * batch + i / steps)] = static_cast<std::int64_t>(ids.data()[i]);
  return rows;
}

Tensor embedding_forward(const Tensor& ids, const Tensor& weight) {
  const std::int64_t tokens = weight.dim(0), width = weight.dim(1);
  Tensor y = Tensor::empty({ids.numel(), width});
  float* to = y.data();
  for (const std::int64_t id : ids_by_row(ids)) {
    TOPKNOT_CHECK(id >= 0 && id < tokens, fmt::format("embedding: id {} of {} tokens", id, tokens));
    to = std::copy_n(weight.data() + id * width, width, to);
  }
  return y;
}

// Each thread has its own tokens, so that the order of a row's sum is the same for any number of threads.
void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t tokens,
                        const GradientTarget& weight) {
  if (!weight.data) return;
  const std::int64_t width = dy.dim(1);
  const std::vector<std::int64_t> rows = ids_by_row(ids);
  parallel_ranges(tokens, [&](int, std::int64_t begin, std::int64_t end) {
    if (!weight.accumulate) std::fill(weight.data + begin * width, weight.data + end * width, 0.0f);
    const float* from = dy.data();
    for (const std::int64_t id : rows) {
      if (id >= begin && id < end) {
        float* to = weight.data + id * width;
        for (std::int64_t j = 0; j < width; ++j) to[j] += from[j];
      }
      from += width;
    }
  });
}

const bool embedding_registered =
    add_cpu_kernels<EmbeddingKernels>({.forward = embedding_forward, .backward = embedding_backward});

}  // namespace
}  // namespace topknot
