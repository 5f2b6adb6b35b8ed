#include "dist/exchange/cuda/device_exchange_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kTile = 4 * kThreads;  // elements of a block

__device__ bool not_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

__device__ bool whole_and_aligned(const float* x, std::size_t tile, std::size_t n) {
  return tile + kTile <= n && reinterpret_cast<std::uintptr_t>(x) % sizeof(float4) == 0;
}

// fn(element) for this thread's elements of [tile, n), of a block's tile at most.
template <class Fn>
__device__ void over_tile(std::size_t tile, std::size_t n, Fn fn) {
  for (std::size_t i = tile + threadIdx.x, j = 0; j < 4 && i < n; ++j, i += kThreads) fn(i);
}

// x[i] = fn(x[i]) over a block's tile, by fours where the memory allows.
template <class Fn>
__device__ void change_tile(float* x, std::size_t n, Fn fn) {
  const std::size_t tile = std::size_t{blockIdx.x} * kTile;
  if (whole_and_aligned(x, tile, n)) {
    float4* const at = reinterpret_cast<float4*>(x + tile) + threadIdx.x;
    float4 four = __ldcs(at);
    four.x = fn(four.x), four.y = fn(four.y), four.z = fn(four.z), four.w = fn(four.w);
    *at = four;
  } else {
    over_tile(tile, n, [&](std::size_t i) { x[i] = fn(x[i]); });
  }
}

__global__ void __launch_bounds__(kThreads) multiply_kernel(float* x, std::size_t n, const float* weight) {
  const float w = *weight;
  if (w == 1.0f) return;
  change_tile(x, n, [w](float value) { return value * w; });
}

__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const float* x, std::size_t n, const float* weight, __nv_bfloat16* to) {
  const float w = *weight;
  over_tile(std::size_t{blockIdx.x} * kTile, n,
            [&](std::size_t i) { to[i] = __float2bfloat16_rn(__ldcs(x + i) * w); });
}

__global__ void __launch_bounds__(kThreads)
    average_kernel(float* x, std::size_t n, float factor, StepStatus* status) {
  bool bad = false;
  change_tile(x, n, [&bad, factor](float sum) {
    bad |= not_finite(sum);
    return (sum + 0.0f) * factor;
  });
  if (bad) atomicOr(&status->bad, 1u);
}

__global__ void __launch_bounds__(kThreads)
    average_bfloat16_kernel(const __nv_bfloat16* sum, float* x, std::size_t n, float factor,
                            StepStatus* status) {
  bool bad = false;
  over_tile(std::size_t{blockIdx.x} * kTile, n, [&](std::size_t i) {
    const float value = __bfloat162float(sum[i]);
    bad |= not_finite(value);
    x[i] = (value + 0.0f) * factor;
  });
  if (bad) atomicOr(&status->bad, 1u);
}

__global__ void rank_status_kernel(const float* loss, RankStatus* mine) {
  *mine = RankStatus{loss && not_finite(*loss), {0, 0, 0}};
}

__global__ void agree_kernel(const std::byte* first, std::size_t stride, int ranks, StepStatus* status) {
  int bad_loss = -1;
  for (int rank = ranks - 1; rank >= 0; --rank)
    if (reinterpret_cast<const RankStatus*>(first + static_cast<std::size_t>(rank) * stride)->bad_loss)
      bad_loss = rank;
  if (bad_loss >= 0) {
    status->bad = 1;
    status->bad_rank = bad_loss;
  } else if (status->bad && ranks == 1) {
    status->bad_rank = 0;
  }
}

}  // namespace

void multiply_by_weight(cudaStream_t stream, float* x, std::size_t n, const float* weight) {
  if (n > 0) launch(multiply_kernel, grid_for(n, kTile), kThreads, stream, x, n, weight);
}

void narrow_by_weight(cudaStream_t stream, const float* x, std::size_t n, const float* weight, void* to) {
  if (n > 0)
    launch(narrow_kernel, grid_for(n, kTile), kThreads, stream, x, n, weight,
           static_cast<__nv_bfloat16*>(to));
}

void average_sum(cudaStream_t stream, float* x, std::size_t n, float factor, StepStatus* status) {
  if (n > 0) launch(average_kernel, grid_for(n, kTile), kThreads, stream, x, n, factor, status);
}

void average_sum_bfloat16(cudaStream_t stream, const void* sum, float* x, std::size_t n, float factor,
                          StepStatus* status) {
  if (n > 0)
    launch(average_bfloat16_kernel, grid_for(n, kTile), kThreads, stream,
           static_cast<const __nv_bfloat16*>(sum), x, n, factor, status);
}

void write_rank_status(cudaStream_t stream, const float* loss, RankStatus* mine) {
  launch(rank_status_kernel, 1, 1, stream, loss, mine);
}

void agree(cudaStream_t stream, const RankStatus* first, std::size_t stride, int ranks, StepStatus* status) {
  launch(agree_kernel, 1, 1, stream, reinterpret_cast<const std::byte*>(first), stride, ranks, status);
}

}  // namespace topknot::cuda
