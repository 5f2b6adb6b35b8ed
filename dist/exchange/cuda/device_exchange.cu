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

__global__ void __launch_bounds__(kThreads) divide_kernel(float* x, std::size_t n, const float* total) {
  const float sum = *total;
  if (sum == 0.0f || sum == 1.0f) return;
  change_tile(x, n, [sum](float value) { return value / sum; });
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

__global__ void rank_status_kernel(const float* loss, int rank, RankStatus* mine) {
  *mine = RankStatus{loss && not_finite(*loss) ? rank : -1, {0, 0, 0}};
}

// The first of the ranks that the statuses name, or -1: ranks ascend from status to status.
__device__ int first_bad(const std::byte* first, std::size_t stride, int statuses) {
  for (int i = 0; i < statuses; ++i) {
    const int rank =
        reinterpret_cast<const RankStatus*>(first + static_cast<std::size_t>(i) * stride)->bad_rank;
    if (rank >= 0) return rank;
  }
  return -1;
}

__global__ void join_statuses_kernel(const std::byte* first, int ranks, RankStatus* host) {
  *host = RankStatus{first_bad(first, sizeof(RankStatus), ranks), {0, 0, 0}};
}

__global__ void agree_kernel(const std::byte* first, std::size_t stride, int statuses, int ranks_per_host,
                             StepStatus* status) {
  const int bad_loss = first_bad(first, stride, statuses);
  if (bad_loss >= 0) {
    status->bad = 1;
    status->bad_rank = bad_loss;
  } else if (status->bad_rank > 0) {
    status->bad_rank *= ranks_per_host;
  } else if (status->bad && statuses == 1 && ranks_per_host == 1) {
    status->bad_rank = 0;
  }
}

}  // namespace

void multiply_by_weight(cudaStream_t stream, float* x, std::size_t n, const float* weight) {
  if (n > 0) launch(multiply_kernel, grid_for(n, kTile), kThreads, stream, x, n, weight);
}

void divide_by_total(cudaStream_t stream, float* x, std::size_t n, const float* total) {
  if (n > 0) launch(divide_kernel, grid_for(n, kTile), kThreads, stream, x, n, total);
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

void write_rank_status(cudaStream_t stream, const float* loss, int rank, RankStatus* mine) {
  launch(rank_status_kernel, 1, 1, stream, loss, rank, mine);
}

void join_rank_statuses(cudaStream_t stream, const RankStatus* first, int ranks, RankStatus* host) {
  launch(join_statuses_kernel, 1, 1, stream, reinterpret_cast<const std::byte*>(first), ranks, host);
}

void agree(cudaStream_t stream, const RankStatus* first, std::size_t stride, int statuses, int ranks_per_host,
           StepStatus* status) {
  launch(agree_kernel, 1, 1, stream, reinterpret_cast<const std::byte*>(first), stride, statuses,
         ranks_per_host, status);
}

}  // namespace topknot::cuda
