#pragma once
// For .cu files: the stream, grid sizes, sums over warps and blocks in a fixed order, accesses to quads.

#include <topknot_kernel.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

cudaStream_t compute_stream();  // of the current context (nn/core/cuda/context.h)

inline constexpr int kThreads = 256;  // of a block, unless a kernel says otherwise
inline constexpr unsigned kAllLanes = 0xffffffffu;

inline std::size_t ceil_div(std::size_t n, std::size_t by) {
  return (n + by - 1) / by;
}

// Blocks for n elements of `per_block` each, at least one (a grid is never empty) and at most `most`: kernels
// that are given fewer than they need go on in strides of the grid.
inline dim3 grid_for(std::size_t n, std::size_t per_block, std::size_t most = 0x7fffffff) {
  const std::size_t blocks = ceil_div(n, per_block);
  return dim3(static_cast<unsigned>(blocks < 1 ? 1 : blocks > most ? most : blocks));
}

// Begins a kernel of a thread an element, in blocks of kThreads: await_previous(), then the thread's number.
template <class T = std::size_t>
__device__ T awaited_index() {
  await_previous();
  return T{blockIdx.x} * kThreads + threadIdx.x;
}

// The sum over lanes 0 to this one.
template <class T>
__device__ T warp_inclusive_sum(T value) {
  for (unsigned by = 1; by < 32; by *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, by);
    if ((threadIdx.x & 31) >= by) value += other;
  }
  return value;
}

// The sum over the threads before this one in a block of exactly kBlock; `total`: over all. Integers, or a
// fixed order for floating-point numbers. Every thread of the block calls; two calls in a row are safe.
template <int kBlock = kThreads, class T>
__device__ T block_exclusive_sum(T value, T& total) {
  __shared__ T warps[kBlock / 32];
  const unsigned warp = threadIdx.x / 32;
  const T inclusive = warp_inclusive_sum(value);
  if ((threadIdx.x & 31) == 31) warps[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
  for (unsigned w = 0; w < kBlock / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();
  return before + inclusive - value;
}

// Reduces the values of a block of exactly kThreads by halves: the same bits in every run, for all threads.
template <class T, class Op>
__device__ T block_reduced(T value, const Op& op) {
  __shared__ T partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] = op(partial[threadIdx.x], partial[threadIdx.x + half]);
    __syncthreads();
  }
  const T all = partial[0];
  __syncthreads();
  return all;
}
template <class T>
__device__ T block_sum(T value) {
  return block_reduced(value, [](T a, T b) { return static_cast<T>(a + b); });
}
// The greatest. A NaN may be passed over.
template <class T>
__device__ T block_max(T value) {
  return block_reduced(value, [](T a, T b) { return b > a ? b : a; });
}

// Whether this block is the last of `blocks` to call, which sees what the others wrote before they called; all of
// its threads call, and get the same answer. *calls, in GPU memory: 0 before the first and after the last call.
__device__ inline bool is_last_block(std::uint32_t* calls, std::uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(calls, 1u) == blocks - 1;
    __threadfence();
    if (last) *calls = 0;
  }
  __syncthreads();
  return last;
}

// The first of `count` ascending indices that is not below `position`.
__device__ inline std::uint32_t lower_bound(const std::uint32_t* indices, std::uint32_t count,
                                            std::size_t position) {
  std::uint32_t begin = 0;
  while (count > 0) {
    const std::uint32_t half = count / 2;
    if (indices[begin + half] < position) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}

// Four neighbouring floats, in one access if kAligned (to 16 bytes). Loads mark them as not needed again.
template <bool kAligned>
__device__ void load_quad(const float* from, float* to) {
  if (kAligned) {
    const float4 quad = __ldcs(reinterpret_cast<const float4*>(from));
    to[0] = quad.x, to[1] = quad.y, to[2] = quad.z, to[3] = quad.w;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = __ldcs(from + c);
  }
}
template <bool kAligned>
__device__ void store_quad(float* to, const float* from) {
  if (kAligned) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = from[c];
  }
}

// Activations are float or bfloat16; arithmetic is in float.
__device__ inline float as_float(float x) {
  return x;
}
__device__ inline float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

void by_type(bool bf16, const auto& fn) {
  if (bf16)
    fn(__nv_bfloat16());
  else
    fn(float());
}

}  // namespace topknot::cuda
