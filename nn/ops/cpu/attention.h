#pragma once
// Attention on CPUs: what is done to a block of queries and a block of keys. Everything runs in the calling
// thread, in fp32: bfloat16 is widened when rows are copied.
//
// Products are tiles of rows by 16 columns that stay in registers. Scores lie transposed, [keys][queries], so
// that the softmax of 16 queries needs no sums across lanes, and keys and values stay as they are.

#include <algorithm>
#include <cstdint>

#include "nn/core/bfloat16.h"
#include "nn/core/simd.h"

namespace topknot::attention_cpu {

inline constexpr std::int64_t kPanel = kLanes;  // columns of a tile
inline constexpr std::int64_t kBlock = 96;      // queries and keys of a block: whole tiles
inline constexpr int kMostRows = 12;            // of a tile

inline std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

// c[r, j] = sum_k a[r, k] b[k, j], or is increased by it. Strides in floats; columns lie in panels of 16.
struct Factors {
  const float* a;
  std::int64_t a_row, a_depth;
  const float* b;
  std::int64_t b_depth, b_panel;
  float* c;
  std::int64_t c_row;
};

struct ProductSize {
  std::int64_t rows, columns, depth;
};
// The part of a product of two blocks that causal attention leaves out. With shift = first key - first query,
// key k meets the queries from k + shift on.
enum class Cut {
  columns,      // c: [keys, queries]. Columns before a row's first query
  depth_end,    // a: [queries, keys]. Keys after a row's last
  depth_begin,  // a: [keys, queries]. Queries before a row's first
};

void product(const Factors& f, const ProductSize& size, Cut cut, std::int64_t shift, bool add);

// A block of scores, [keys][kBlock], of which `queries` columns are in use.
struct Block {
  std::int64_t queries, keys, shift;  // shift: as above; -kBlock if every key meets every query
  std::int64_t panels() const { return round_up(queries, kPanel) / kPanel; }
  // The keys that the first query of a panel meets, and those that its last one does.
  std::int64_t met_by_all(std::int64_t panel) const {
    return std::clamp<std::int64_t>(panel * kPanel - shift + 1, 0, keys);
  }
  std::int64_t met_by_one(std::int64_t panel) const {
    return std::clamp<std::int64_t>((panel + 1) * kPanel - shift, 0, keys);
  }
  // Rows of a panel that the tiles of other products read.
  std::int64_t read(std::int64_t panel) const { return std::min(keys, met_by_one(panel) + kMostRows); }
};

// A query's running softmax: the greatest score, in units of log 2, and the sum of 2^(score - top). `factor`:
// 2^(the last block's top - top).
struct Softmax {
  float top[kBlock], sum[kBlock], factor[kBlock];
};

// Scores become weights, 2^(score - top).
void softmax_block(const Block& block, float* scores, Softmax& softmax);

// P = 2^(S - log_sum) in place of the scores S, and dS = P (dP - D) in place of dP.
void score_gradients(const Block& block, const float* log_sum, const float* d, float* scores, float* grads);

// Rows of one head where a tensor has them: `stride` elements apart.
template <class T>
struct HeadRows {
  T* at;
  std::int64_t stride;
  T* row(std::int64_t i) const { return at + i * stride; }
};

// n rows of `width` elements, contiguous, each filled up with zeros to whole panels.
void copy_rows(const HeadRows<const float>& from, std::int64_t n, std::int64_t width, float* to);
void copy_rows(const HeadRows<const BFloat16>& from, std::int64_t n, std::int64_t width, float* to);
// Such rows, times factors[i * factor_step], to where a tensor has them.
void write_rows(const float* from, std::int64_t n, std::int64_t width, const float* factors,
                std::int64_t factor_step, const HeadRows<float>& to);
void write_rows(const float* from, std::int64_t n, std::int64_t width, const float* factors,
                std::int64_t factor_step, const HeadRows<BFloat16>& to);

// Such rows times `factor` as panels of 16 of them, [panel][width][16]; zeros after the last row.
void transpose_rows(const float* from, std::int64_t n, std::int64_t width, float factor, float* to);

// rows[i] *= factors[i], whole panels.
void scale_rows(float* rows, std::int64_t n, std::int64_t padded, const float* factors);

// sums[i] = sum of a[i] b[i] over a row, in a fixed order.
void row_products(const float* a, const float* b, std::int64_t n, std::int64_t padded, float* sums);

}  // namespace topknot::attention_cpu
