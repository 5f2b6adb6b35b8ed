// swiglu: y = silu(a) b. Per element of y: about 20 FLOPs forward and 30 backward, most of them silu's exp
// and division. Forward reads two elements and writes one, backward three and two: both are bound by memory.
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable swiglu(const Variable& x) {
  const Shape& in = x.shape();
  TOPKNOT_CHECK(in.rank() == 2 && in[1] > 0 && in[1] % 2 == 0,
                "swiglu: rows of an even number of columns, not " + in.str());
  const auto& kernels = kernels_for<SwigluKernels>(x);
  Tensor y = Tensor::empty({in[0], in[1] / 2}, Layout::plain, x.value().device(), x.value().dtype());
  kernels.forward(x.value(), y);
  return op_on("swiglu", x, y,
               [=, &kernels](const Tensor& dy, Tensor& dx) { kernels.backward(x.value(), dy, dx); });
}

namespace {

// On a CPU: rows [begin, end).

template <class T>
TOPKNOT_INLINE void gate(const T* x, T* y, std::int64_t begin, std::int64_t end, std::int64_t width) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T *a = x + row * 2 * width, *b = a + width;
    T* out = y + row * width;
    in_lanes(
        width, [=]<class V>(std::int64_t i, V) __attribute__((always_inline)) {
          store_as<V>(out + i, SiluRule{}.value(load_as<V>(a + i)) * load_as<V>(b + i));
        });
  }
}

template <class T>
TOPKNOT_INLINE void gate_backward(const T* x, const T* dy, T* dx, std::int64_t begin, std::int64_t end,
                                  std::int64_t width) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T *a = x + row * 2 * width, *b = a + width, *grad = dy + row * width;
    T *da = dx + row * 2 * width, *db = da + width;
    in_lanes(
        width, [=]<class V>(std::int64_t i, V) __attribute__((always_inline)) {
          const V of_a = load_as<V>(a + i), of_b = load_as<V>(b + i), g = load_as<V>(grad + i);
          store_as<V>(da + i, g * of_b * SiluRule{}.slope(of_a));
          store_as<V>(db + i, g * SiluRule{}.value(of_a));
        });
  }
}

TOPKNOT_MULTIVERSION void gate_rows(const Tensor& x, Tensor& y, std::int64_t begin, std::int64_t end) {
  if (x.dtype() == DType::bf16)
    gate(x.as<BFloat16>(), y.as<BFloat16>(), begin, end, y.dim(1));
  else
    gate(x.data(), y.data(), begin, end, y.dim(1));
}
TOPKNOT_MULTIVERSION void gate_backward_rows(const Tensor& x, const Tensor& dy, Tensor& dx,
                                             std::int64_t begin, std::int64_t end) {
  if (x.dtype() == DType::bf16)
    gate_backward(x.as<BFloat16>(), dy.as<BFloat16>(), dx.as<BFloat16>(), begin, end, dy.dim(1));
  else
    gate_backward(x.data(), dy.data(), dx.data(), begin, end, dy.dim(1));
}

void swiglu_forward(const Tensor& x, Tensor& y) {
  parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) { gate_rows(x, y, begin, end); });
}
void swiglu_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
    gate_backward_rows(x, dy, dx, begin, end);
  });
}

const bool swiglu_registered =
    add_cpu_kernels<SwigluKernels>({.forward = swiglu_forward, .backward = swiglu_backward});

}  // namespace
}  // namespace topknot
