#pragma once
// Shared by the ops' .cu files, with nn/core/cuda/kernel_tools.h: tensors as kernels take them. A .cu file
// holds an op's kernels, the functions that launch them on the current context's stream, registered.

#include <string>
#include <utility>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

inline bool is_bf16(const Tensor& x) {
  return x.dtype() == DType::bf16;
}

inline std::size_t elements(const Tensor& x) {
  return static_cast<std::size_t>(x.numel());
}

// For kernels that count in 32 bits; the caller has checked the range.
inline std::uint32_t word(std::int64_t value) {
  return static_cast<std::uint32_t>(value);
}

// fn(T()) with the type of x's elements, which are x.as<T>().
void by_type(const Tensor& x, const auto& fn) {
  by_type(is_bf16(x), fn);
}

// A thread for each of n elements on the current context's stream; nothing for none.
template <class... P, class... A>
void launch_each(std::size_t n, void (*kernel)(P...), A&&... arguments) {
  if (n > 0) launch(kernel, grid_for(n, kThreads), kThreads, compute_stream(), std::forward<A>(arguments)...);
}

// Throws Error unless x is an nhwc activation whose elements can be counted in 32 bits.
inline void check_counted_nhwc(const char* op, const Tensor& x) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc && x.numel() < std::int64_t{1} << 32,
                std::string(op) + ": an nhwc activation of fewer than 2^32 elements, not " + x.shape().str());
}

// For losses: *out = the sum of n values / by, as a float; in double, in a fixed order. In loss.cu.
void mean_of(cudaStream_t stream, const double* values, std::size_t n, double by, float* out);

}  // namespace topknot::cuda
