// Attention of bfloat16 rows on tensor cores (Dao, "FlashAttention-2", arXiv 2307.08691): scores, weights and
// sums are in float; weights and their gradients are rounded to bfloat16 where they enter a product. In a
// fixed order, without atomic additions: the queries' gradients and those of keys and values are kernels of
// their own, each of which computes the scores again.
//
// A warp has 16 rows of one side (queries, or keys for their own gradients) in registers, a block 64. It
// meets the other side a tile at a time, which lies in shared memory, the next one on its way. Products of a
// head's forward pass: 4 steps^2 width operations (half if causal), of the gradients 3.5 times as many.
#include <type_traits>

#include "nn/ops/cuda/attention.h"

namespace topknot::cuda {
namespace {

constexpr int kBlock = 128, kBlockRows = 64;  // threads and rows of a block: 16 rows a warp
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
using Word = __nv_bfloat16;

// Tiles for heads of up to kW elements: rows of a tile; how many there are in shared memory at a time.
template <int kW>
inline constexpr int kTile = kW <= 64 ? 64 : 32;
template <int kW>
inline constexpr int kStages = kW <= 128 ? 2 : 1;
// A row of a tile: 16 bytes more than it needs, for the banks of shared memory.
template <int kW>
struct alignas(16) Row {
  Word at[kW + 8];
};

__device__ inline int lane() {
  return static_cast<int>(threadIdx.x & 31);
}
__device__ inline int warp() {
  return static_cast<int>(threadIdx.x / 32);
}

// Copies rows first to first + kRows of a head into shared memory, zeros after the last token and the last
// element. The whole block calls; the rows are there after await_copies() and __syncthreads(). `whole`: rows
// begin at multiples of 16 bytes and consist of such.
template <int kW, int kRows>
__device__ void fetch(const HeadRows<const Word>& rows, std::int64_t first, int width, bool whole,
                      Row<kW>* to) {
  constexpr int kPieces = kW / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kBlock) {
    const int r = i / kPieces, c = i % kPieces * 8;
    const bool real = first + r < rows.steps && c < width;
    const Word* from = rows.row(first + r) + (real ? c : 0);
    if (whole)
      begin_copy(&to[r].at[c], from, real);
    else
      for (int e = 0; e < 8; ++e) to[r].at[c + e] = real && c + e < width ? from[e] : from_float<Word>(0.0f);
  }
}

// This warp's 16 rows as left operands, kW / 16 of them.
template <int kW>
__device__ void load_left(const Row<kW>* rows, unsigned (*a)[4]) {
#pragma unroll
  for (int k = 0; k < kW / 16; ++k)
    load_matrices<false>(&rows[16 * warp() + (lane() & 15)].at[16 * k + (lane() >> 4) * 8], a[k]);
}
// The block's own rows, by way of a buffer for kBlockRows in shared memory, which is free again after it.
template <int kW>
__device__ void own_rows(const HeadRows<const Word>& rows, std::int64_t first, int width, bool whole,
                         Row<kW>* buffer, unsigned (*a)[4]) {
  fetch<kW, kBlockRows>(rows, first, width, whole, buffer);
  close_copies();
  await_copies<0>();
  __syncthreads();
  load_left<kW>(buffer, a);
  __syncthreads();
}

// out[n] = the warp's rows times rows 8 n to 8 n + 8 of the tile, transposed; as multiply_add() has them.
template <int kW>
__device__ void products(const unsigned (*a)[4], const Row<kW>* tile, float (*out)[4]) {
#pragma unroll
  for (int n = 0; n < kTile<kW> / 8; n += 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[n][e] = out[n + 1][e] = 0;
#pragma unroll
    for (int k = 0; k < kW / 16; ++k) {
      unsigned b[4];
      load_matrices<false>(&tile[8 * n + (lane() & 7) + (lane() >> 4) * 8].at[16 * k + (lane() >> 3 & 1) * 8],
                           b);
      multiply_add(a[k], b, out[n]);
      multiply_add(a[k], b + 2, out[n + 1]);
    }
  }
}

// sums[n] += the weights, as products() lays them out, times columns 8 n to 8 n + 8 of the tile.
template <int kW>
__device__ void add_weighted(const float (*weights)[4], const Row<kW>* tile, float (*sums)[4]) {
#pragma unroll
  for (int k = 0; k < kTile<kW> / 16; ++k) {
    const float *left = weights[2 * k], *right = weights[2 * k + 1];
    const unsigned a[4] = {two_words(left[0], left[1]), two_words(left[2], left[3]),
                           two_words(right[0], right[1]), two_words(right[2], right[3])};
#pragma unroll
    for (int n = 0; n < kW / 8; n += 2) {
      unsigned b[4];
      load_matrices<true>(&tile[16 * k + (lane() & 15)].at[8 * n + (lane() >> 4) * 8], b);
      multiply_add(a, b, sums[n]);
      multiply_add(a, b + 2, sums[n + 1]);
    }
  }
}

// The warp's rows of the result, from token `first` on: sums[n], row r of the lane's two, times factors[r].
template <int kW>
__device__ void write_rows(const HeadRows<Word>& rows, std::int64_t first, int width, bool whole,
                           const float (*sums)[4], float factor0, float factor1) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t t = first + lane() / 4 + 8 * r;
    if (t >= rows.steps) continue;
    Word* row = rows.row(t);
    const float factor = r == 0 ? factor0 : factor1;
#pragma unroll
    for (int n = 0; n < kW / 8; ++n) {
      const int c = 8 * n + lane() % 4 * 2;
      const unsigned both = two_words(sums[n][2 * r] * factor, sums[n][2 * r + 1] * factor);
      if (whole) {
        if (c < width) *reinterpret_cast<unsigned*>(row + c) = both;
      } else {
        if (c < width) row[c] = __ushort_as_bfloat16(static_cast<unsigned short>(both & 0xffff));
        if (c + 1 < width) row[c + 1] = __ushort_as_bfloat16(static_cast<unsigned short>(both >> 16));
      }
    }
  }
}

// The scores outside `met(row, column)` become those of weight 0.
template <int kW, class Met>
__device__ void mask(float (*scores)[4], const Met& met) {
#pragma unroll
  for (int n = 0; n < kTile<kW> / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!met(e / 2, 8 * n + lane() % 4 * 2 + e % 2)) scores[n][e] = -INFINITY;
}

// Over the four lanes that share a row.
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ inline float row_greatest(float x) {
  for (int by = 1; by < 4; by *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, by);
    x = other > x ? other : x;
  }
  return x;
}

// compute(j, stage) for j from `begin` to `end`, while what get(j + 1, stage) copies is under way.
template <int kW, class Get, class Compute>
__device__ void over_tiles(std::int64_t begin, std::int64_t end, const Get& get, const Compute& compute) {
  constexpr bool kAhead = kStages<kW> == 2;
  if (kAhead && begin < end) get(begin, 0), close_copies();
  int stage = 0;
  for (std::int64_t j = begin; j < end; ++j) {
    if (!kAhead) get(j, 0), close_copies();
    if (kAhead && j + 1 < end) {
      get(j + 1, 1 - stage), close_copies();
      await_copies<1>();
    } else {
      await_copies<0>();
    }
    __syncthreads();
    compute(j, stage);
    __syncthreads();  // before the next copy into this stage
    if (kAhead) stage = 1 - stage;
  }
}

// A block's 64 queries of a head, and their keys, a tile at a time. A causal head's last queries come first.
template <int kW>
struct QueryBlock {
  AttentionCall c;
  bool whole;
  std::int64_t of_head, b, h, first;
  HeadRows<const Word> queries, keys, values;

  __device__ QueryBlock(const AttentionCall& call, bool whole_rows, const Word* qkv)
      : c(call),
        whole(whole_rows),
        of_head(blockIdx.x % (c.batch * c.heads)),
        b(of_head / c.heads),
        h(of_head % c.heads) {
    const std::int64_t all = c.batch * c.heads, g = h / c.share;
    first = ((c.steps + kBlockRows - 1) / kBlockRows - 1 - blockIdx.x / all) * kBlockRows;
    queries = head_rows(c, qkv, c.all_heads(), b, h);
    keys = head_rows(c, qkv, c.all_heads(), b, c.heads + g);
    values = head_rows(c, qkv, c.all_heads(), b, c.heads + c.kv_heads + g);
  }
  __device__ int width() const { return static_cast<int>(c.width); }
  // The first of the lane's two rows, which are 8 apart.
  __device__ std::int64_t mine() const { return first + 16 * warp() + lane() / 4; }
  // The last key of tile j that query t meets, counted from the tile's first; below 0: none.
  __device__ int met(std::int64_t t, std::int64_t j) const {
    const std::int64_t last = (c.causal && t < c.steps ? t : c.steps - 1) - j * kTile<kW>;
    return static_cast<int>(last < kTile<kW> ? last : kTile<kW>);
  }
  // Weight 0 for the keys of tile j that a query does not meet, if there are such keys for any of the warp's.
  __device__ void mask_scores(float (*scores)[4], std::int64_t j) const {
    if (met(first + 16 * warp(), j) >= kTile<kW> - 1) return;
    const int last[] = {met(mine(), j), met(mine() + 8, j)};
    mask<kW>(scores, [&](int r, int column) { return column <= last[r]; });
  }
  // compute(j, stage), with the tile's keys in tiles[stage][0] and its values in tiles[stage][1].
  template <class Compute>
  __device__ void over_keys(Row<kW> (*tiles)[2][kTile<kW>], const Compute& compute) const {
    const std::int64_t seen = c.causal && first + kBlockRows < c.steps ? first + kBlockRows : c.steps;
    over_tiles<kW>(
        0, (seen + kTile<kW> - 1) / kTile<kW>,
        [&](std::int64_t j, int stage) {
          fetch<kW, kTile<kW>>(keys, j * kTile<kW>, width(), whole, tiles[stage][0]);
          fetch<kW, kTile<kW>>(values, j * kTile<kW>, width(), whole, tiles[stage][1]);
        },
        compute);
  }
};

// A block for 64 queries of a head.
template <int kW>
__global__ void __launch_bounds__(kBlock)
    attention_forward_bf16_kernel(AttentionCall c, bool whole, const Word* __restrict__ qkv,
                                  Word* __restrict__ y, float* __restrict__ log_sums) {
  await_previous();
  __shared__ Row<kW> tiles[kStages<kW>][2][kTile<kW>];
  const QueryBlock<kW> block(c, whole, qkv);
  const std::int64_t mine = block.mine();
  unsigned q[kW / 16][4];
  own_rows<kW>(block.queries, block.first, block.width(), whole, tiles[0][0], q);

  // Weights are powers of 2; `top` is the greatest score before it is scaled.
  const float scale = c.scale * kLog2E;
  float sums[kW / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  block.over_keys(tiles, [&](std::int64_t j, int stage) {
    float weights[kTile<kW> / 8][4];
    products<kW>(q, tiles[stage][0], weights);
    block.mask_scores(weights, j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = top[r];
#pragma unroll
      for (int n = 0; n < kTile<kW> / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float s = weights[n][2 * r + e];
          highest = s > highest ? s : highest;
        }
      highest = row_greatest(highest);
      const float factor = power_of_two((top[r] - highest) * scale), base = highest * scale;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kTile<kW> / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& weight = weights[n][2 * r + e];
          sum += weight = power_of_two(fmaf(weight, scale, -base));
        }
      top[r] = highest;
      total[r] = total[r] * factor + sum;
#pragma unroll
      for (int n = 0; n < kW / 8; ++n) sums[n][2 * r] *= factor, sums[n][2 * r + 1] *= factor;
    }
    add_weighted<kW>(weights, tiles[stage][1], sums);
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = row_sum(total[r]);
    if (lane() % 4 == 0 && mine + 8 * r < c.steps)
      log_sums[block.of_head * c.steps + mine + 8 * r] = (top[r] * scale + log2f(total[r])) * kLn2;
  }
  write_rows<kW>(head_rows(c, y, c.heads, block.b, block.h), block.first + 16 * warp(), block.width(), whole,
                 sums, 1 / total[0], 1 / total[1]);
}

// dQ = dS K, dS = P (dO V^T - D). A block for 64 queries of a head.
template <int kW>
__global__ void __launch_bounds__(kBlock)
    attention_queries_bf16_kernel(AttentionCall c, bool whole, const Word* __restrict__ qkv,
                                  const Word* __restrict__ dy, const float* __restrict__ log_sums,
                                  const float* __restrict__ d, Word* __restrict__ dqkv) {
  await_previous();
  __shared__ Row<kW> tiles[kStages<kW>][2][kTile<kW>];
  const QueryBlock<kW> block(c, whole, qkv);
  const std::int64_t mine = block.mine();
  unsigned q[kW / 16][4], o[kW / 16][4];
  own_rows<kW>(block.queries, block.first, block.width(), whole, tiles[0][0], q);
  own_rows<kW>(head_rows(c, dy, c.heads, block.b, block.h), block.first, block.width(), whole, tiles[0][0],
               o);

  const float scale = c.scale * kLog2E;
  float sums[kW / 8][4] = {}, log_sum[2], of_row[2];
  for (int r = 0; r < 2; ++r) {
    const bool real = mine + 8 * r < c.steps;
    log_sum[r] = real ? log_sums[block.of_head * c.steps + mine + 8 * r] * kLog2E : INFINITY;
    of_row[r] = real ? d[block.of_head * c.steps + mine + 8 * r] : 0.0f;
  }
  block.over_keys(tiles, [&](std::int64_t j, int stage) {
    float grads[kTile<kW> / 8][4], by_weight[kTile<kW> / 8][4];
    products<kW>(q, tiles[stage][0], grads);
    products<kW>(o, tiles[stage][1], by_weight);
    block.mask_scores(grads, j);
#pragma unroll
    for (int n = 0; n < kTile<kW> / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        grads[n][i] =
            power_of_two(fmaf(grads[n][i], scale, -log_sum[i / 2])) * (by_weight[n][i] - of_row[i / 2]);
    add_weighted<kW>(grads, tiles[stage][0], sums);
  });
  write_rows<kW>(head_rows(c, dqkv, c.all_heads(), block.b, block.h), block.first + 16 * warp(),
                 block.width(), whole, sums, c.scale, c.scale);
}

// dV = P^T dO, dK = dS^T Q. A block for 64 keys of a key-value head, over the queries of all its heads.
template <int kW>
__global__ void __launch_bounds__(kBlock)
    attention_keys_bf16_kernel(AttentionCall c, bool whole, const Word* __restrict__ qkv,
                               const Word* __restrict__ dy, const float* __restrict__ log_sums,
                               const float* __restrict__ d, Word* __restrict__ dqkv) {
  await_previous();
  __shared__ Row<kW> tiles[kStages<kW>][2][kTile<kW>];
  __shared__ float shared_sums[kStages<kW>][2][kTile<kW>];  // of the tile's queries: log_sums, d
  const std::int64_t all = c.batch * c.kv_heads, of_group = blockIdx.x % all, b = of_group / c.kv_heads,
                     g = of_group % c.kv_heads, first = blockIdx.x / all * kBlockRows, key_head = c.heads + g,
                     value_head = key_head + c.kv_heads;
  const int width = static_cast<int>(c.width);
  unsigned k[kW / 16][4], v[kW / 16][4];
  own_rows<kW>(head_rows(c, qkv, c.all_heads(), b, key_head), first, width, whole, tiles[0][0], k);
  own_rows<kW>(head_rows(c, qkv, c.all_heads(), b, value_head), first, width, whole, tiles[0][0], v);

  const std::int64_t mine = first + 16 * warp() + lane() / 4;
  const float scale = c.scale * kLog2E;
  float of_keys[kW / 8][4] = {}, of_values[kW / 8][4] = {};
  for (std::int64_t h = g * c.share; h < (g + 1) * c.share; ++h) {
    const auto queries = head_rows(c, qkv, c.all_heads(), b, h), outputs = head_rows(c, dy, c.heads, b, h);
    const std::int64_t of_head = (b * c.heads + h) * c.steps;
    over_tiles<kW>(
        c.causal ? first / kTile<kW> : 0, (c.steps + kTile<kW> - 1) / kTile<kW>,
        [&](std::int64_t i, int stage) {
          fetch<kW, kTile<kW>>(queries, i * kTile<kW>, width, whole, tiles[stage][0]);
          fetch<kW, kTile<kW>>(outputs, i * kTile<kW>, width, whole, tiles[stage][1]);
          const auto t = static_cast<int>(threadIdx.x);
          if (t >= kTile<kW>) return;
          const bool real = i * kTile<kW> + t < c.steps;
          shared_sums[stage][0][t] = real ? log_sums[of_head + i * kTile<kW> + t] * kLog2E : INFINITY;
          shared_sums[stage][1][t] = real ? d[of_head + i * kTile<kW> + t] : 0.0f;
        },
        [&](std::int64_t i, int stage) {
          float weights[kTile<kW> / 8][4], grads[kTile<kW> / 8][4];
          products<kW>(k, tiles[stage][0], weights);
          products<kW>(v, tiles[stage][1], grads);
          // Query t of the tile meets this warp's keys up to that number.
          const std::int64_t behind = mine - i * kTile<kW>;
          if (c.causal && first + 16 * warp() + 15 > i * kTile<kW>)
            mask<kW>(weights, [&](int r, int t) { return t >= behind + 8 * r; });
#pragma unroll
          for (int n = 0; n < kTile<kW> / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int t = 8 * n + lane() % 4 * 2 + e;
              const float log_sum = shared_sums[stage][0][t], of_row = shared_sums[stage][1][t];
#pragma unroll
              for (int at = e; at < 4; at += 2) {
                const float weight = power_of_two(fmaf(weights[n][at], scale, -log_sum));
                weights[n][at] = weight;
                grads[n][at] = weight * (grads[n][at] - of_row);
              }
            }
          add_weighted<kW>(weights, tiles[stage][1], of_values);
          add_weighted<kW>(grads, tiles[stage][0], of_keys);
        });
  }
  const std::int64_t at = first + 16 * warp();
  write_rows<kW>(head_rows(c, dqkv, c.all_heads(), b, key_head), at, width, whole, of_keys, c.scale, c.scale);
  write_rows<kW>(head_rows(c, dqkv, c.all_heads(), b, value_head), at, width, whole, of_values, 1.0f, 1.0f);
}

// fn(the elements of a head that the kernel provides for), as a type
void by_width(std::int64_t width, const auto& fn) {
  if (width <= 32) return fn(std::integral_constant<int, 32>());
  if (width <= 64) return fn(std::integral_constant<int, 64>());
  if (width <= 128) return fn(std::integral_constant<int, 128>());
  fn(std::integral_constant<int, 256>());
}

dim3 blocks(const AttentionCall& call, std::int64_t heads) {
  return dim3(word(call.batch * heads * ((call.steps + kBlockRows - 1) / kBlockRows)));
}

bool whole_rows(const AttentionCall& call, std::initializer_list<const void*> tensors) {
  std::uintptr_t all = static_cast<std::uintptr_t>(call.width) * sizeof(Word);
  for (const void* data : tensors) all |= reinterpret_cast<std::uintptr_t>(data);
  return all % 16 == 0;
}

}  // namespace

void attention_forward_bf16(const AttentionCall& call, const Tensor& qkv, Tensor& y, float* log_sums) {
  const bool whole = whole_rows(call, {qkv.data(), y.data()});
  by_width(call.width, [&](auto width) {
    launch_in_turn(attention_forward_bf16_kernel<decltype(width)::value>, blocks(call, call.heads), kBlock,
                   compute_stream(), call, whole, qkv.as<Word>(), y.as<Word>(), log_sums);
  });
}

void attention_backward_bf16(const AttentionCall& call, const Tensor& qkv, const Tensor& dy,
                             const float* log_sums, const float* d, Tensor& dqkv) {
  const bool whole = whole_rows(call, {qkv.data(), dy.data(), dqkv.data()});
  by_width(call.width, [&](auto width) {
    launch_in_turn(attention_queries_bf16_kernel<decltype(width)::value>, blocks(call, call.heads), kBlock,
                   compute_stream(), call, whole, qkv.as<Word>(), dy.as<Word>(), log_sums, d,
                   dqkv.as<Word>());
    launch_in_turn(attention_keys_bf16_kernel<decltype(width)::value>, blocks(call, call.kv_heads), kBlock,
                   compute_stream(), call, whole, qkv.as<Word>(), dy.as<Word>(), log_sums, d,
                   dqkv.as<Word>());
  });
}

}  // namespace topknot::cuda
