#include "nn/ops/cpu/gemm.h"

#include <fmt/format.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <array>
#include <map>

#include "nn/core/base/check.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/onednn.h"

namespace topknot {
namespace {

// oneDNN has no plain call for bfloat16. The calling thread's primitives, by shape and number of compute threads.
const DnnlKernel& bfloat16_product(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n,
                                   std::int64_t k, bool add) {
  using dnnl::memory;
  thread_local std::map<std::array<std::int64_t, 7>, std::unique_ptr<DnnlKernel>> products;
  auto& product = products[{transpose_a, transpose_b, m, n, k, add, omp_get_max_threads()}];
  if (product) return *product;
  const auto matrix = [](std::int64_t rows, std::int64_t columns, bool transposed, DType type) {
    return memory::desc({rows, columns}, onednn_type(type),
                        transposed ? memory::dims{1, rows} : memory::dims{columns, 1});
  };
  const memory::desc a = matrix(m, k, transpose_a, DType::bf16), b = matrix(k, n, transpose_b, DType::bf16),
                     c = matrix(m, n, false, DType::f32);
  dnnl::primitive_attr attributes = user_scratchpad();
  dnnl::post_ops sum;
  if (add) sum.append_sum(1.0f);
  attributes.set_post_ops(sum);
  const dnnl::matmul::primitive_desc desc({a, b, c}, attributes, dnnl_cpu_engine());
  product = std::make_unique<DnnlKernel>(
      dnnl::matmul(desc), DnnlKernel::Arguments{{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}},
      desc.scratchpad_desc(), 1);
  return *product;
}

}  // namespace

void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, DType type,
            const void* a, const void* b, float beta, float* c) {
  if (type == DType::bf16)
    return bfloat16_product(transpose_a, transpose_b, m, n, k, beta != 0).run(0, {a, b, c});
  const auto status = dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f,
                                 static_cast<const float*>(a), transpose_a ? m : k,
                                 static_cast<const float*>(b), transpose_b ? k : n, beta, c, n);
  TOPKNOT_CHECK(status == dnnl_success,
                fmt::format("oneDNN sgemm failed, status {}", static_cast<int>(status)));
}

void bias_gradient(const Tensor& dy, const GradientTarget& target) {
  if (!target.data) return;
  const std::int64_t rows = dy.dim(0), out = dy.dim(1);
  Tensor db = Tensor::zeros({out});
  float* sums = db.data();
  by_type(dy.dtype(), [&](auto type) {
    const auto* row = dy.as<decltype(type)>();
    for (std::int64_t i = 0; i < rows; ++i, row += out)
      for (std::int64_t o = 0; o < out; ++o) sums[o] += widened(row[o]);
  });
  write_gradient(target, db);
}

}  // namespace topknot
