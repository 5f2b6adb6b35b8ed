// Rotary position embedding.
//
// Floor, for n elements of s bytes of which a share r are queries and keys (2 / 3 with as many heads of keys
// as of queries): 3 FLOPs an element of that share. In place, as it is if nobody else holds the input or the
// gradient, it reads and writes 2 r n s bytes; into memory of its own 2 n s. Cosines and sines are made anew
// for each position, about 30 FLOPs a pair, which all heads and sequences share: less than a table would read.
#include "nn/ops/rope_rule.h"

#include <cmath>
#include <numbers>

#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable rope(Variable qkv, std::int64_t heads, std::int64_t kv_heads, std::int64_t batch, float base) {
  const Shape in = qkv.shape();
  const std::string what = "rope: input " + in.str() + " of " + std::to_string(batch) + " sequences, " +
                           std::to_string(heads) + " heads of queries, " + std::to_string(kv_heads) +
                           " of keys and values: ";
  const std::int64_t all = heads + 2 * kv_heads;
  TOPKNOT_CHECK(heads > 0 && kv_heads > 0 && batch > 0 && in.rank() == 2 && in[0] % batch == 0 && in[1] > 0 &&
                    in[1] % (2 * all) == 0 && in[1] / (2 * all) <= RopeCall::kMostPairs,
                what + "rows of whole heads of an even number of elements, at most " +
                    std::to_string(2 * RopeCall::kMostPairs) + ", a row for each sequence at each position");
  TOPKNOT_CHECK(base >= 1 && std::isfinite(base), what + "the base must be 1 or more");
  RopeCall call{heads + kv_heads, kv_heads, in[1] / (2 * all), batch, false, {}};
  for (std::int64_t j = 0; j < call.pairs; ++j)
    call.quarters[j] =
        std::pow(static_cast<double>(base), -static_cast<double>(j) / static_cast<double>(call.pairs)) *
        (2 * std::numbers::inv_pi);
  const auto& kernels = kernels_for<RopeKernels>(qkv);
  Tensor y = qkv.exclusive() ? qkv.value() : Tensor::empty_like(qkv.value());
  kernels.rotate(call, qkv.value(), y);
  return {"rope", y, {qkv}, [qkv, call, &kernels](Tensor grad) {
            RopeCall back = call;
            back.back = true;
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            kernels.rotate(back, grad, dx);
            qkv.accumulate_grad(std::move(dx));
          }};
}

namespace {

template <class T>
TOPKNOT_INLINE void rotate(const RopeCall& call, const T* x, T* y, std::int64_t begin, std::int64_t end) {
  const std::int64_t pairs = call.pairs, head = 2 * pairs, width = (call.rotated + call.kept) * head;
  float cosines[RopeCall::kMostPairs], sines[RopeCall::kMostPairs];
  for (std::int64_t row = begin; row < end; ++row) {
    if (row == begin || row % call.batch == 0) {
      const auto position = static_cast<double>(row / call.batch);
      const float sign = call.back ? -1.0f : 1.0f;
      for (std::int64_t j = 0; j < pairs; ++j) {
        const Rotation by = rotation_of(position * call.quarters[j]);
        cosines[j] = by.cosine;
        sines[j] = sign * by.sine;
      }
    }
    const T* from = x + row * width;
    T* to = y + row * width;
    for (std::int64_t h = 0; h < call.rotated; ++h, from += head, to += head)
      in_lanes(
          pairs, [ =, &cosines, &sines ]<class V>(std::int64_t j, V) __attribute__((always_inline)) {
            const V c = load_as<V>(cosines + j), s = load_as<V>(sines + j);
            const V a = load_as<V>(from + j), b = load_as<V>(from + pairs + j);
            store_as<V>(to + j, a * c - b * s);
            store_as<V>(to + pairs + j, b * c + a * s);
          });
    if (x != y)
      std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(call.kept * head) * sizeof(T));
  }
}

TOPKNOT_MULTIVERSION void rotate_rows(const RopeCall& call, const Tensor& x, Tensor& y, std::int64_t begin,
                                      std::int64_t end) {
  if (x.dtype() == DType::bf16)
    rotate(call, x.as<BFloat16>(), y.as<BFloat16>(), begin, end);
  else
    rotate(call, x.data(), y.data(), begin, end);
}

const bool rope_registered =
    add_cpu_kernels<RopeKernels>({.rotate = [](const RopeCall& call, const Tensor& x, Tensor& y) {
      parallel_ranges(
          x.dim(0), [&](int, std::int64_t begin, std::int64_t end) { rotate_rows(call, x, y, begin, end); });
    }});

}  // namespace
}  // namespace topknot
