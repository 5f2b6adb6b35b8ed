#include "nn/ops/cpu/gemm.h"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "nn/base/check.h"
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/onednn.h"

namespace topknot {

struct Product::Kernels {
  std::unique_ptr<DnnlKernel> product, pack;
  Shape packed;  // in floats
};

Product::Product(const ProductForm& form, Order order) : kernels_(std::make_unique<Kernels>()) {
  using dnnl::memory;
  const auto f32 = memory::data_type::f32, type = onednn_type(form.type);
  const memory::dims a_size{form.m, form.k}, b_size{form.k, form.n}, c_size{form.m, form.n};
  const auto strides = [](const memory::dims& size, bool transposed) {
    return transposed ? memory::dims{1, size[0]} : memory::dims{size[1], 1};
  };
  const memory::desc a(a_size, type, strides(a_size, form.a_transposed)),
      given(b_size, onednn_type(form.b_type),
            form.b_transposed ? memory::dims{1, form.b_stride} : memory::dims{form.b_stride, 1}),
      wanted = order == Order::packed ? memory::desc(b_size, type, memory::format_tag::any)
                                      : memory::desc(b_size, type, strides(b_size, form.b_transposed)),
      c(c_size, onednn_type(form.c_type), strides(c_size, false)),
      bias = form.bias ? memory::desc({1, form.n}, f32, memory::dims{form.n, 1}) : memory::desc();
  dnnl::primitive_attr attributes = user_scratchpad();
  dnnl::post_ops add;
  if (form.add) add.append_sum(1.0f);
  attributes.set_post_ops(add);
  const dnnl::matmul::primitive_desc product({a, wanted, bias, c}, attributes, dnnl_cpu_engine());
  const memory::desc packed = product.weights_desc();
  DnnlKernel::Arguments arguments{{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, c}};
  if (form.bias) arguments.emplace_back(DNNL_ARG_BIAS, bias);
  kernels_->product =
      std::make_unique<DnnlKernel>(dnnl::matmul(product), arguments, product.scratchpad_desc(), 1);
  kernels_->packed = {static_cast<std::int64_t>((packed.get_size() + sizeof(float) - 1) / sizeof(float))};
  const dnnl::reorder::primitive_desc pack(dnnl_cpu_engine(), given, dnnl_cpu_engine(), packed,
                                           user_scratchpad());
  kernels_->pack = std::make_unique<DnnlKernel>(
      dnnl::reorder(pack), DnnlKernel::Arguments{{DNNL_ARG_FROM, given}, {DNNL_ARG_TO, packed}},
      pack.scratchpad_desc(), 1);
}

Product::~Product() = default;

Tensor Product::pack(const void* b) const {
  Tensor packed = Tensor::empty(kernels_->packed);
  kernels_->pack->run(0, {b, packed.data()});
  return packed;
}

void Product::run(const void* a, const void* packed_b, void* c, const float* bias) const {
  if (bias)
    kernels_->product->run(0, {a, packed_b, c, bias});
  else
    kernels_->product->run(0, {a, packed_b, c});
}

namespace {

// c += v M, the rows of M one after the other.
TOPKNOT_MULTIVERSION void add_rows(const float* v, const float* rows, std::int64_t stride, std::int64_t depth,
                                   std::int64_t n, float* c) {
  for (std::int64_t k = 0; k < depth; ++k)
    for (std::int64_t i = 0; i < n; ++i) c[i] += v[k] * rows[k * stride + i];
}

TOPKNOT_INLINE float dot_lanes(const float* v, const float* row, std::size_t depth) {
  Lanes lanes{};
  for (std::size_t k = 0; k < depth; k += kLanes) {
    const std::size_t count = std::min(kLanes, depth - k);
    lanes += load_part(v + k, count) * load_part(row + k, count);
  }
  float sum = 0;
  for (std::size_t i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}
TOPKNOT_MULTIVERSION void add_dots(const float* v, const float* rows, std::int64_t stride, std::int64_t depth,
                                   std::int64_t n, float* c) {
  for (std::int64_t i = 0; i < n; ++i)
    c[i] += dot_lanes(v, rows + i * stride, static_cast<std::size_t>(depth));
}

// sgemm() of one row or column; unlike oneDNN's, its order of sums does not depend on the number of threads.
void vector_product(const ProductForm& f, const float* a, const float* b, float* c, const float* bias) {
  const bool row = f.m == 1;
  const std::int64_t n = row ? f.n : f.m;
  const bool dots = row ? f.b_transposed : !f.a_transposed;  // a row of the matrix has the terms of one sum
  const float *v = row ? a : b, *matrix = row ? b : a;
  const std::int64_t stride = row ? f.b_stride : f.a_transposed ? f.m : f.k;
  std::vector<float> column;
  if (!row && !f.b_transposed && f.b_stride != 1) {
    for (std::int64_t k = 0; k < f.k; ++k) column.push_back(b[k * f.b_stride]);
    v = column.data();
  }
  constexpr std::int64_t kParallel = 1 << 14,
                         kPart = 1024;  // multiplications; outputs that stay in the cache
  const auto run = [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += kPart) {
      const std::int64_t count = std::min(kPart, end - at);
      if (bias)
        for (std::int64_t i = at; i < at + count; ++i) c[i] = bias[row ? i : 0];
      else if (!f.add)
        std::fill_n(c + at, count, 0.0f);
      if (dots)
        add_dots(v, matrix + at * stride, stride, f.k, count, c + at);
      else
        add_rows(v, matrix + at, stride, f.k, count, c + at);
    }
  };
  if (n * f.k < kParallel)
    run(0, 0, n);
  else
    parallel_ranges(n, run);
}

}  // namespace

void sgemm(const ProductForm& f, const float* a, const float* b, float* c, const float* bias) {
  if (f.m == 1 || f.n == 1) return vector_product(f, a, b, c, bias);
  team_size();  // what oneDNN goes by
  // The first call makes the kernels of all.
  [[maybe_unused]] static const bool has_room = (check_kernel_room(), true);
  if (bias) parallel_each(f.m, [&](std::int64_t i) { std::copy_n(bias, f.n, c + i * f.n); });
  const auto status =
      dnnl_sgemm(f.a_transposed ? 'T' : 'N', f.b_transposed ? 'T' : 'N', f.m, f.n, f.k, 1.0f, a,
                 f.a_transposed ? f.m : f.k, b, f.b_stride, bias || f.add ? 1.0f : 0.0f, c, f.n);
  TOPKNOT_CHECK(status == dnnl_success,
                fmt::format("oneDNN sgemm failed, status {}", static_cast<int>(status)));
}

void matmul(const ProductForm& form, const void* a, const void* b, void* c, const float* bias) {
  // In fp32 sgemm needs no primitive and is about as fast as one (2 threads, Zen 5), but for a b that is
  // transposed, with more than a few rows: up to 5 times slower for 3072 to 4096 features.
  if (form.type == DType::f32 && (!form.b_transposed || form.m <= kFewRows || form.n == 1))
    return sgemm(form, static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(c),
                 bias);
  constexpr std::int64_t kManyRows = 256;
  const bool packed = form.m >= kManyRows;
  // The calling thread's, by form and number of compute threads.
  thread_local std::map<std::pair<ProductForm, int>, std::unique_ptr<Product>> products;
  constexpr std::size_t kMost = 256;  // where every batch has a length of its own, as in speech
  if (products.size() >= kMost) products.clear();
  auto& product = products[{form, team_size()}];
  if (!product)
    product = std::make_unique<Product>(form, packed ? Product::Order::packed : Product::Order::plain);
  if (packed || form.b_type != form.type)
    product->run(a, product->pack(b).data(), c, bias);
  else
    product->run(a, b, c, bias);
}

Tensor sum_over_rows(const Tensor& dy) {
  const std::int64_t rows = dy.dim(0), columns = dy.dim(1);
  Tensor sums = Tensor::zeros({columns});
  constexpr std::int64_t kPart = 64;  // columns that one thread adds at a time
  by_type(dy.dtype(), [&](auto type) {
    const auto* first = dy.as<decltype(type)>();
    parallel_ranges((columns + kPart - 1) / kPart, [&](int, std::int64_t begin, std::int64_t end) {
      const std::int64_t last = std::min(columns, end * kPart);
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t o = begin * kPart; o < last; ++o) sums.data()[o] += widened(first[i * columns + o]);
    });
  });
  return sums;
}

}  // namespace topknot
