#pragma once
// Products of row-major matrices by oneDNN, in fp32 or of bfloat16 operands, and the gradient of a bias.

#include <compare>
#include <cstdint>
#include <memory>

#include "nn/core/autograd.h"

namespace topknot {

// c = a b, plus a row of biases to each of its rows or plus what c held; a is m x k, b is k x n.
struct ProductForm {
  std::int64_t m, n, k;
  DType type;                                       // of a; b is rounded to it. Sums are fp32
  DType b_type = type;                              // as b is given
  DType c_type = DType::f32;                        // bf16 only with `type` bf16
  bool a_transposed = false, b_transposed = false;  // it lies as k x m, as n x k
  bool bias = false, add = false;
  std::int64_t b_stride = b_transposed ? k : n;  // elements from one row of b, as it lies, to the next
  auto operator<=>(const ProductForm&) const = default;
};

// One product, on as many threads as OpenMP gave when it was made.
class Product {
 public:
  // How it reads b: as it lies, or in oneDNN's order, which pays for many products of a b, or many rows.
  enum class Order { plain, packed };
  Product(const ProductForm& form, Order order);
  ~Product();
  // b in the type and order in which run() reads it.
  Tensor pack(const void* b) const;
  void run(const void* a, const void* packed_b, void* c, const float* bias = nullptr) const;

 private:
  struct Kernels;
  std::unique_ptr<Kernels> kernels_;
};

// Rows up to which a product takes less time than rounding its b would.
inline constexpr std::int64_t kFewRows = 8;

// One product on the calling rank's threads.
void matmul(const ProductForm& form, const void* a, const void* b, void* c, const float* bias = nullptr);

// The same in fp32 by oneDNN's plain call, which packs parts of b as it needs them; in a parallel region by
// one thread. If c is one row or one column, its bits do not depend on the number of threads; those of other products
// may, where k is about 1,000 or more and c is narrow.
void sgemm(const ProductForm& form, const float* a, const float* b, float* c, const float* bias = nullptr);

// The sum of dy [rows, out] over its rows, in f32.
Tensor sum_over_rows(const Tensor& dy);

}  // namespace topknot
