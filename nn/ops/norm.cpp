// layer_norm and rms_norm over rows, with or without the residual add before them.
//
// Floor, for n elements of s bytes. Forward: about 8 FLOPs an element; reads x and writes y: 2 n s bytes.
// Backward: about 16 FLOPs an element; reads x and dy and writes dx: 3 n s, one n s more if dx is added to. A
// row (3 KB at a width of 768 in f32) is read again from the first cache, for the variance and the result. So
// both passes are bound by memory, or by the cache that holds the activations.
//
// The add before a norm moves 3 n s on its own, add and norm 5 n s, add_layer_norm 4 n s. Their gradients
// need no fused kernel: the norm's dx is added to the sum's gradient in the same pass (InputGradient), and
// that one tensor is the gradient of x and of the branch.
#include "nn/core/simd.h"

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/norm_rows.h"

namespace topknot {

namespace {

NormCall norm_call(const char* op, bool centred, const Variable& x, const Variable& weight,
                   const Variable& bias, float epsilon) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 2 && in[1] > 0 && weight.shape() == Shape{in[1]},
                std::string(op) + ": input " + in.str() + ", weight " + weight.shape().str());
  TOPKNOT_CHECK(!bias.defined() || bias.shape() == weight.shape(),
                std::string(op) + ": input " + in.str() + ", bias " + bias.shape().str());
  TOPKNOT_CHECK(epsilon >= 0, std::string(op) + ": epsilon must not be negative");
  return {centred, epsilon, x.value(), weight.value(), bias.defined() ? bias.value() : Tensor()};
}

// The norm as an op on x, once y and the statistics are there. x's value is call.x.
Variable normalized(const char* op, const NormCall& call, const Variable& x, const Variable& weight,
                    const Variable& bias, const Tensor& y, const Tensor& statistics) {
  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {op, y, std::move(inputs), [=](Tensor dy) {
            WeightedGradients out(x, weight, bias);
            kernels_for<NormKernels>(x).backward(call, statistics, dy, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

Tensor statistics_of(const Tensor& x) {
  return Tensor::empty({2, x.dim(0)}, Layout::plain, x.device());
}

Variable norm(const char* op, bool centred, const Variable& x, const Variable& weight, const Variable& bias,
              float epsilon) {
  NormCall call = norm_call(op, centred, x, weight, bias, epsilon);
  Tensor y = Tensor::empty_like(call.x), statistics = statistics_of(call.x);
  kernels_for<NormKernels>(x).forward(call, {}, {}, y, statistics);
  return normalized(op, call, x, weight, bias, y, statistics);
}

SumAndNorm add_norm(const char* op, bool centred, const Variable& x, const Variable& branch,
                    const Variable& weight, const Variable& bias, float epsilon) {
  TOPKNOT_CHECK(x.shape() == branch.shape(),
                std::string(op) + ": " + x.shape().str() + " and " + branch.shape().str());
  const DType branch_type = branch.value().dtype();
  NormCall call = norm_call(op, centred, x, weight, bias, epsilon);
  call.x = Tensor::empty_like(x.value());
  Tensor y = Tensor::empty_like(call.x), statistics = statistics_of(call.x);
  kernels_for<NormKernels>(x).forward(call, x.value(), in_form(branch.value(), Layout::plain, call.x.dtype()),
                                      y, statistics);
  const Variable sum("add", call.x, {x, branch}, [=](Tensor grad) {  // dx = dbranch = ds
    branch.accumulate_grad(in_form(grad, Layout::plain, branch_type));
    x.accumulate_grad(std::move(grad));
  });
  return {sum, normalized(op, call, sum, weight, bias, y, statistics)};
}

}  // namespace

Variable layer_norm(const Variable& x, const Variable& weight, const Variable& bias, float epsilon) {
  return norm("layer_norm", true, x, weight, bias, epsilon);
}
Variable rms_norm(const Variable& x, const Variable& weight, float epsilon) {
  return norm("rms_norm", false, x, weight, {}, epsilon);
}
SumAndNorm add_layer_norm(const Variable& x, const Variable& branch, const Variable& weight,
                          const Variable& bias, float epsilon) {
  return add_norm("add_layer_norm", true, x, branch, weight, bias, epsilon);
}
SumAndNorm add_rms_norm(const Variable& x, const Variable& branch, const Variable& weight, float epsilon) {
  return add_norm("add_rms_norm", false, x, branch, weight, {}, epsilon);
}

namespace {

// On a CPU. Lanes8, since GCC keeps wider ones in memory without AVX-512. Sums over a row are in 8 x 8 lanes,
// then by halves, and what is left of the row one by one: their order depends on the width alone.

constexpr int kChains = 8;  // sums that do not wait for one another
constexpr std::int64_t kWide = 8;

// The k-th of the vectors that a row is taken in at a time; after the last whole one, kChains: single floats.
template <int k>
struct Chain {
  using V = std::conditional_t<(k < kChains), Lanes8, float>;
};

// fn(i, chain) for the elements from the i-th on that chain's V holds.
template <class Fn, int... k>
TOPKNOT_INLINE void over_chains(std::int64_t i, const Fn& fn, std::integer_sequence<int, k...>) {
  (fn(i + k * kWide, Chain<k>{}), ...);
}
TOPKNOT_INLINE void over_row(std::int64_t width, const auto& fn) {
  std::int64_t i = 0;
  for (; i + kChains * kWide <= width; i += kChains * kWide)
    over_chains(i, fn, std::make_integer_sequence<int, kChains>());
  for (; i + kWide <= width; i += kWide) fn(i, Chain<0>{});
  for (; i < width; ++i) fn(i, Chain<kChains>{});
}

struct NormSum {
  Lanes8 chain[kChains] = {};
  float rest = 0;
  template <int k>
  TOPKNOT_INLINE void add(Chain<k>, typename Chain<k>::V v) {
    if constexpr (k < kChains)
      chain[k] += v;
    else
      rest += v;
  }
  TOPKNOT_INLINE float total() const {
    float lanes[kWide];
    store_as<Lanes8>(lanes, ((chain[0] + chain[1]) + (chain[2] + chain[3])) +
                                ((chain[4] + chain[5]) + (chain[6] + chain[7])));
    for (std::int64_t half = kWide / 2; half > 0; half /= 2)
      for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0] + rest;
  }
};

#define TOPKNOT_ROW_LAMBDA __attribute__((always_inline))

template <bool centred, class T>
TOPKNOT_INLINE void norm_rows(const NormRows<T>& rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = rows.width;
  const auto count = static_cast<float>(width);
  for (std::int64_t row = begin; row < end; ++row) {
    T *x = rows.x + row * width, *y = rows.y + row * width;
    NormSum first, second;  // of x, and of (x - mean)^2
    if (rows.left) {
      const T *left = rows.left + row * width, *branch = rows.branch + row * width;
      over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
        using V = typename decltype(chain)::V;
        store_as<V>(x + i, load_as<V>(left + i) + load_as<V>(branch + i));
      });
    }
    if constexpr (centred)
      over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
        first.add(chain, load_as<typename decltype(chain)::V>(x + i));
      });
    const float mean = centred ? first.total() / count : 0.0f;
    over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
      using V = typename decltype(chain)::V;
      const V d = load_as<V>(x + i) - mean;
      second.add(chain, d * d);
    });
    const float inverse = 1.0f / std::sqrt(second.total() / count + rows.epsilon);
    rows.mean[row] = mean;
    rows.inverse[row] = inverse;
    over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
      using V = typename decltype(chain)::V;
      V v = (load_as<V>(x + i) - mean) * inverse * load_as<V>(rows.weight + i);
      if (rows.bias) v += load_as<V>(rows.bias + i);
      store_as<V>(y + i, v);
    });
  }
}

// dweight, dbias: `width` sums over these rows, which it begins at zero; dbias null if there is none.
template <bool centred, class T>
TOPKNOT_INLINE void norm_gradient_rows(const NormGradientRows<T>& rows, float* dweight, float* dbias,
                                       std::int64_t begin, std::int64_t end) {
  const std::int64_t width = rows.width;
  const auto count = static_cast<float>(width);
  const float* weight = rows.weight;
  std::memset(dweight, 0, static_cast<std::size_t>(width) * sizeof(float));
  if (dbias) std::memset(dbias, 0, static_cast<std::size_t>(width) * sizeof(float));
  for (std::int64_t row = begin; row < end; ++row) {
    const T *x = rows.x + row * width, *dy = rows.dy + row * width;
    const float mean = centred ? rows.mean[row] : 0.0f, inverse = rows.inverse[row];
    NormSum of_g, of_product;  // of g = dy w, and of g xhat
    over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
      using V = typename decltype(chain)::V;
      const V d = load_as<V>(dy + i), product = d * ((load_as<V>(x + i) - mean) * inverse);
      const V w = load_as<V>(weight + i);
      store_as<V>(dweight + i, load_as<V>(dweight + i) + product);
      if (dbias) store_as<V>(dbias + i, load_as<V>(dbias + i) + d);
      if constexpr (centred) of_g.add(chain, d * w);
      of_product.add(chain, product * w);
    });
    if (!rows.dx) continue;
    T* dx = rows.dx + row * width;
    const float mean_g = centred ? of_g.total() / count : 0.0f, mean_product = of_product.total() / count;
    over_row(width, [&](std::int64_t i, auto chain) TOPKNOT_ROW_LAMBDA {
      using V = typename decltype(chain)::V;
      const V xhat = (load_as<V>(x + i) - mean) * inverse;
      V v = (load_as<V>(dy + i) * load_as<V>(weight + i) - mean_g - xhat * mean_product) * inverse;
      if (rows.accumulate) v += load_as<V>(dx + i);
      store_as<V>(dx + i, v);
    });
  }
}

#undef TOPKNOT_ROW_LAMBDA

TOPKNOT_MULTIVERSION void norm_loop(const NormRows<float>& rows, bool centred, std::int64_t begin,
                                    std::int64_t end) {
  centred ? norm_rows<true>(rows, begin, end) : norm_rows<false>(rows, begin, end);
}
TOPKNOT_MULTIVERSION void norm_loop(const NormRows<BFloat16>& rows, bool centred, std::int64_t begin,
                                    std::int64_t end) {
  centred ? norm_rows<true>(rows, begin, end) : norm_rows<false>(rows, begin, end);
}
TOPKNOT_MULTIVERSION void norm_gradient_loop(const NormGradientRows<float>& rows, bool centred,
                                             float* dweight, float* dbias, std::int64_t begin,
                                             std::int64_t end) {
  centred ? norm_gradient_rows<true>(rows, dweight, dbias, begin, end)
          : norm_gradient_rows<false>(rows, dweight, dbias, begin, end);
}
TOPKNOT_MULTIVERSION void norm_gradient_loop(const NormGradientRows<BFloat16>& rows, bool centred,
                                             float* dweight, float* dbias, std::int64_t begin,
                                             std::int64_t end) {
  centred ? norm_gradient_rows<true>(rows, dweight, dbias, begin, end)
          : norm_gradient_rows<false>(rows, dweight, dbias, begin, end);
}

// to[i] (+)= the sum over chunks of sums[chunk][stride], in their order, for i < n.
TOPKNOT_MULTIVERSION void add_chunks(const float* sums, std::int64_t chunks, std::int64_t stride,
                                     std::int64_t n, bool accumulate, float* to) {
  if (!accumulate) std::memset(to, 0, static_cast<std::size_t>(n) * sizeof(float));
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
    for (std::int64_t i = 0; i < n; ++i) to[i] += sums[chunk * stride + i];
}

void norm_forward(NormCall& call, const Tensor& left, const Tensor& branch, Tensor& y, Tensor& statistics) {
  by_type(call.x.dtype(), [&]<class T>(T) {
    const NormRows<T> rows(call, left, branch, y, statistics);
    parallel_ranges(rows.rows, [&](int, std::int64_t begin, std::int64_t end) {
      norm_loop(rows, call.centred, begin, end);
    });
  });
}

// Chunks of rows whose sums for dweight and dbias are made one by one, then added in order: as many for any
// number of threads, and few enough that the sums take less memory than the activations.
std::int64_t norm_chunks(std::int64_t rows) {
  constexpr std::int64_t kMost = 64, kLeastRows = 8;
  return std::clamp<std::int64_t>(rows / kLeastRows, 1, kMost);
}

void norm_backward(const NormCall& call, const Tensor& statistics, const Tensor& dy, WeightedGradients& out) {
  const std::int64_t count = call.x.dim(0), width = call.x.dim(1), chunks = norm_chunks(count);
  const std::int64_t stride = (width + 15) / 16 * 16;  // a chunk's sums begin a line of the cache
  const bool bias = out.bias.data != nullptr;
  Tensor sums = Tensor::empty({bias ? 2 : 1, chunks, stride});
  float *dweight = sums.data(), *dbias = bias ? sums.data() + chunks * stride : nullptr;
  by_type(call.x.dtype(), [&]<class T>(T) {
    const NormGradientRows<T> rows(call, statistics, dy, out.x);
    parallel_each(chunks, [&](std::int64_t chunk) {
      norm_gradient_loop(rows, call.centred, dweight + chunk * stride,
                         bias ? dbias + chunk * stride : nullptr, count * chunk / chunks,
                         count * (chunk + 1) / chunks);
    });
  });
  if (out.weight.data) add_chunks(dweight, chunks, stride, width, out.weight.accumulate, out.weight.data);
  if (bias) add_chunks(dbias, chunks, stride, width, out.bias.accumulate, out.bias.data);
}

const bool norm_registered =
    add_cpu_kernels<NormKernels>({.forward = norm_forward, .backward = norm_backward});

}  // namespace
}  // namespace topknot
