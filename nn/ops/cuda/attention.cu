// Attention as nn/ops/ops.h has it, without a matrix of steps x steps (Dao, "FlashAttention-2", arXiv
// 2307.08691): the forward pass keeps the logarithm of each row's sum, the backward pass computes the scores
// again. All of it is in float, in a fixed order, without atomic additions (bfloat16 rows: attention_bf16.cu). A
// warp has kRows rows of one side (queries, or keys for their own gradients) and meets the other
// side 32 rows at a time, a lane for each.
#include <type_traits>

#include "nn/ops/cuda/attention.h"

namespace topknot::cuda {
namespace {

constexpr int kRows = 4, kWarps = kThreads / 32, kBlockRows = kRows * kWarps, kTile = 32;
static_assert(kBlockRows == kTile, "causal attention leaves out whole tiles");

// The call, and the tiles of a head.
struct Call : AttentionCall {
  std::int64_t tiles;
  explicit Call(const AttentionShape& s) : AttentionCall(s), tiles((s.steps + kTile - 1) / kTile) {}
};

// A block's place: its tile and its head.
struct Place {
  std::int64_t tile, head;
  __device__ explicit Place(std::int64_t tiles) : tile(blockIdx.x % tiles), head(blockIdx.x / tiles) {}
};

// Rows of 32 tokens in shared memory. A row has one word more than it needs: lanes read a column.
template <int kWide>
struct Tile {
  float at[kTile][32 * kWide + 1];
};

// The whole block.
template <int kWide>
__device__ void load_tile(const HeadRows<const float>& rows, std::int64_t tile, std::int64_t width,
                          Tile<kWide>& to) {
  __syncthreads();  // nobody reads the last one
  for (int i = static_cast<int>(threadIdx.x); i < kTile * static_cast<int>(width); i += kThreads) {
    const int r = i / static_cast<int>(width), c = i % static_cast<int>(width);
    to.at[r][c] = rows.row(tile * kTile + r)[c];
  }
  __syncthreads();
}

// out[r] = the product of this warp's row r, from token `first` on, and the lane's row of the tile.
template <int kWide>
__device__ void products(const HeadRows<const float>& rows, std::int64_t first, std::int64_t width,
                         const Tile<kWide>& tile, float* out) {
  const float* mine = tile.at[threadIdx.x & 31];
  const float* row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = rows.row(first + r), out[r] = 0;
  for (int c = 0; c < static_cast<int>(width); ++c)
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = fmaf(row[r][c], mine[c], out[r]);
}

// sums[r][i] += sum over the tile's rows u of weights[r][u] rows[u][lane + 32 i]
template <int kWide>
__device__ void add_weighted(const float (*weights)[kTile], const HeadRows<const float>& rows,
                             std::int64_t tile, std::int64_t width, float (*sums)[kWide]) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const std::int64_t first = tile * kTile, left = rows.steps - first;
  for (int u = 0; u < (left < kTile ? static_cast<int>(left) : kTile); ++u) {
    const float* row = rows.row(first + u);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float x = lane + 32 * i < width ? row[lane + 32 * i] : 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r][i] = fmaf(weights[r][u], x, sums[r][i]);
    }
  }
}

// rows[first + r] = sums[r] times a factor of each
template <int kWide>
__device__ void write_rows(const HeadRows<float>& rows, std::int64_t first, std::int64_t width,
                           const float (*sums)[kWide], const float* factors) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int i = 0; i < kWide; ++i)
      if (first + r < rows.steps && lane + 32 * i < width)
        rows.row(first + r)[lane + 32 * i] = sums[r][i] * factors[r];
}

__device__ inline bool meets(const Call& c, std::int64_t query, std::int64_t key) {
  return query < c.steps && key < c.steps && (!c.causal || key <= query);
}

// A block for 32 queries of a head. log_sums: [batch * heads, steps].
template <int kWide>
__global__ void __launch_bounds__(kThreads)
    attention_forward_kernel(Call c, const float* __restrict__ qkv, float* __restrict__ y,
                             float* __restrict__ log_sums) {
  await_previous();
  __shared__ Tile<kWide> tile;
  __shared__ float shared_weights[kWarps][kRows][kTile];
  const Place place(c.tiles);
  const std::int64_t b = place.head / c.heads, h = place.head % c.heads, g = h / c.share, width = c.width;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x & 31);
  const std::int64_t first = place.tile * kTile + warp * kRows;
  const auto queries = head_rows(c, qkv, c.all_heads(), b, h),
             keys = head_rows(c, qkv, c.all_heads(), b, c.heads + g),
             values = head_rows(c, qkv, c.all_heads(), b, c.heads + c.kv_heads + g);
  float(*weights)[kTile] = shared_weights[warp];
  float sums[kRows][kWide] = {}, top[kRows], total[kRows] = {};
  for (float& t : top) t = -INFINITY;
  for (std::int64_t j = 0; j <= (c.causal ? place.tile : c.tiles - 1); ++j) {
    load_tile(keys, j, width, tile);
    float scores[kRows];
    products(queries, first, width, tile, scores);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool met = meets(c, first + r, j * kTile + lane);
      const float score = scores[r] * c.scale;
      float highest = met && score > top[r] ? score : top[r];
      for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, highest, by);
        highest = other > highest ? other : highest;
      }
      const float factor = expf(top[r] - highest), weight = met ? expf(score - highest) : 0.0f;
      float sum = weight;
      for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
      top[r] = highest;
      total[r] = total[r] * factor + sum;
#pragma unroll
      for (int i = 0; i < kWide; ++i) sums[r][i] *= factor;
      weights[r][lane] = weight;
    }
    __syncwarp();
    add_weighted(weights, values, j, width, sums);
    __syncwarp();
  }
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0 && first + r < c.steps)
      log_sums[place.head * c.steps + first + r] = top[r] + logf(total[r]);
    total[r] = 1 / total[r];
  }
  write_rows(head_rows(c, y, c.heads, b, h), first, width, sums, total);
}

// d[head, t] = the sum of dy y over the row: a warp for each.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_sums_kernel(Call c, const T* __restrict__ y, const T* __restrict__ dy, float* __restrict__ d) {
  await_previous();
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= c.batch * c.heads * c.steps) return;  // the whole warp
  const std::int64_t head = row / c.steps, t = row % c.steps, b = head / c.heads, h = head % c.heads;
  const T *left = head_rows(c, y, c.heads, b, h).row(t), *right = head_rows(c, dy, c.heads, b, h).row(t);
  float sum = 0;
  for (std::int64_t i = threadIdx.x & 31; i < c.width; i += 32) sum += as_float(left[i]) * as_float(right[i]);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
  if ((threadIdx.x & 31) == 0) d[row] = sum;
}

// dQ = dS K, dS = P (dO V^T - D). A block for 32 queries of a head.
template <int kWide>
__global__ void __launch_bounds__(kThreads)
    attention_queries_kernel(Call c, const float* __restrict__ qkv, const float* __restrict__ dy,
                             const float* __restrict__ log_sums, const float* __restrict__ d,
                             float* __restrict__ dqkv) {
  await_previous();
  __shared__ Tile<kWide> tile;
  __shared__ float shared_grads[kWarps][kRows][kTile];
  const Place place(c.tiles);
  const std::int64_t b = place.head / c.heads, h = place.head % c.heads, g = h / c.share, width = c.width;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x & 31);
  const std::int64_t first = place.tile * kTile + warp * kRows, of_head = place.head * c.steps;
  const auto queries = head_rows(c, qkv, c.all_heads(), b, h),
             keys = head_rows(c, qkv, c.all_heads(), b, c.heads + g),
             values = head_rows(c, qkv, c.all_heads(), b, c.heads + c.kv_heads + g),
             outputs = head_rows(c, dy, c.heads, b, h);
  float(*grads)[kTile] = shared_grads[warp];
  float sums[kRows][kWide] = {};
  for (std::int64_t j = 0; j <= (c.causal ? place.tile : c.tiles - 1); ++j) {
    float scores[kRows], by_weight[kRows];
    load_tile(keys, j, width, tile);
    products(queries, first, width, tile, scores);
    load_tile(values, j, width, tile);
    products(outputs, first, width, tile, by_weight);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      grads[r][lane] = meets(c, first + r, j * kTile + lane)
                           ? expf(scores[r] * c.scale - log_sums[of_head + first + r]) *
                                 (by_weight[r] - d[of_head + first + r])
                           : 0.0f;
    __syncwarp();
    add_weighted(grads, keys, j, width, sums);
    __syncwarp();
  }
  const float factors[kRows] = {c.scale, c.scale, c.scale, c.scale};
  write_rows(head_rows(c, dqkv, c.all_heads(), b, h), first, width, sums, factors);
}

// dV = P^T dO, dK = dS^T Q. A block for 32 keys of a key-value head, over the queries of all its heads.
template <int kWide>
__global__ void __launch_bounds__(kThreads)
    attention_keys_kernel(Call c, const float* __restrict__ qkv, const float* __restrict__ dy,
                          const float* __restrict__ log_sums, const float* __restrict__ d,
                          float* __restrict__ dqkv) {
  await_previous();
  __shared__ Tile<kWide> tile;
  __shared__ float shared_weights[kWarps][kRows][kTile], shared_grads[kWarps][kRows][kTile];
  const Place place(c.tiles);
  const std::int64_t b = place.head / c.kv_heads, g = place.head % c.kv_heads, width = c.width;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x & 31);
  const std::int64_t first = place.tile * kTile + warp * kRows, key_head = c.heads + g,
                     value_head = key_head + c.kv_heads;
  const auto keys = head_rows(c, qkv, c.all_heads(), b, key_head),
             values = head_rows(c, qkv, c.all_heads(), b, value_head);
  float(*weights)[kTile] = shared_weights[warp], (*grads)[kTile] = shared_grads[warp];
  float of_keys[kRows][kWide] = {}, of_values[kRows][kWide] = {};
  for (std::int64_t h = g * c.share; h < (g + 1) * c.share; ++h) {
    const auto queries = head_rows(c, qkv, c.all_heads(), b, h), outputs = head_rows(c, dy, c.heads, b, h);
    const std::int64_t of_head = (b * c.heads + h) * c.steps;
    for (std::int64_t i = c.causal ? place.tile : 0; i < c.tiles; ++i) {
      float scores[kRows], by_weight[kRows];
      load_tile(queries, i, width, tile);
      products(keys, first, width, tile, scores);
      load_tile(outputs, i, width, tile);
      products(values, first, width, tile, by_weight);
      const std::int64_t query = i * kTile + lane;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool met = meets(c, query, first + r);
        const float weight = met ? expf(scores[r] * c.scale - log_sums[of_head + query]) : 0.0f;
        weights[r][lane] = weight;
        grads[r][lane] = met ? weight * (by_weight[r] - d[of_head + query]) : 0.0f;
      }
      __syncwarp();
      add_weighted(weights, outputs, i, width, of_values);
      add_weighted(grads, queries, i, width, of_keys);
      __syncwarp();
    }
  }
  const float scales[kRows] = {c.scale, c.scale, c.scale, c.scale}, ones[kRows] = {1, 1, 1, 1};
  write_rows(head_rows(c, dqkv, c.all_heads(), b, key_head), first, width, of_keys, scales);
  write_rows(head_rows(c, dqkv, c.all_heads(), b, value_head), first, width, of_values, ones);
}

// fn(the columns of a lane), as a type
void by_width(std::int64_t width, const auto& fn) {
  if (width <= 32) return fn(std::integral_constant<int, 1>());
  if (width <= 64) return fn(std::integral_constant<int, 2>());
  if (width <= 128) return fn(std::integral_constant<int, 4>());
  fn(std::integral_constant<int, 8>());
}

dim3 grid(std::int64_t heads, std::int64_t tiles) {
  return dim3(word(heads * tiles));
}

OpState forward(const AttentionShape& s, const Tensor& qkv, Tensor& y) {
  const Call call(s);
  const auto log_sums =
      std::make_shared<DeviceArray<float>>(static_cast<std::size_t>(s.batch * s.heads * s.steps));
  if (is_bf16(qkv))
    attention_forward_bf16(call, qkv, y, log_sums->data());
  else
    by_width(s.width, [&](auto wide) {
      launch_in_turn(attention_forward_kernel<decltype(wide)::value>, grid(s.batch * s.heads, call.tiles),
                     kThreads, compute_stream(), call, qkv.data(), y.data(), log_sums->data());
    });
  return log_sums;
}

void backward(const AttentionShape& s, const Tensor& qkv, const Tensor& y, const Tensor& dy,
              const OpState& state, Tensor& dqkv) {
  const Call call(s);
  const auto& log_sums = state_as<DeviceArray<float>>(state);
  const DeviceArray<float> d(log_sums.size());
  by_type(qkv, [&]<class T>(T) {
    launch_in_turn(attention_sums_kernel<T>, grid_for(d.size(), kWarps), kThreads, compute_stream(), call,
                   y.as<T>(), dy.as<T>(), d.data());
  });
  if (is_bf16(qkv)) return attention_backward_bf16(call, qkv, dy, log_sums.data(), d.data(), dqkv);
  by_width(s.width, [&](auto wide) {
    launch_in_turn(attention_queries_kernel<decltype(wide)::value>, grid(s.batch * s.heads, call.tiles),
                   kThreads, compute_stream(), call, qkv.data(), dy.data(), log_sums.data(), d.data(),
                   dqkv.data());
    launch_in_turn(attention_keys_kernel<decltype(wide)::value>, grid(s.batch * s.kv_heads, call.tiles),
                   kThreads, compute_stream(), call, qkv.data(), dy.data(), log_sums.data(), d.data(),
                   dqkv.data());
  });
}

const bool registered = add_cuda_kernels<AttentionKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
