#include <oneapi/dnnl/dnnl.h>

#include "nn/core/base/check.h"
#include "nn/ops/linear.h"

namespace topknot {

void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
            const float* a, const float* b, float beta, float* c) {
  const auto status = dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a,
                                 transpose_a ? m : k, b, transpose_b ? k : n, beta, c, n);
  TOPKNOT_CHECK(status == dnnl_success, "oneDNN sgemm failed, status " + std::to_string(status));
}

}  // namespace topknot
