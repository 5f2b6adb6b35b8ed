#include "nn/ops/cpu/gemm.h"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include "nn/core/base/check.h"

namespace topknot {

void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
            const float* a, const float* b, float beta, float* c) {
  const auto status = dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a,
                                 transpose_a ? m : k, b, transpose_b ? k : n, beta, c, n);
  TOPKNOT_CHECK(status == dnnl_success,
                fmt::format("oneDNN sgemm failed, status {}", static_cast<int>(status)));
}

void bias_gradient(const Tensor& dy, const GradientTarget& target) {
  if (!target.data) return;
  const std::int64_t rows = dy.dim(0), out = dy.dim(1);
  Tensor db = Tensor::zeros({out});
  float* sums = db.data();
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* row = dy.data() + i * out;
    for (std::int64_t o = 0; o < out; ++o) sums[o] += row[o];
  }
  write_gradient(target, db);
}

}  // namespace topknot
