// Compiled with fused multiply-adds (nn/CMakeLists.txt): without them the products take twice as long.
#include "nn/ops/cpu/attention.h"

#include <limits>

#include "nn/core/tensor.h"

namespace topknot::attention_cpu {
namespace {

template <class V, int R>
TOPKNOT_INLINE void tile(const Factors& f, std::int64_t row, std::int64_t panel, std::int64_t begin,
                         std::int64_t end, bool add) {
  constexpr std::int64_t wide = sizeof(V) / sizeof(float), count = kPanel / wide;
  const float *a = f.a + row * f.a_row + begin * f.a_depth, *b = f.b + panel * f.b_panel + begin * f.b_depth;
  float* c = f.c + row * f.c_row + panel * kPanel;
  V sums[R][count];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < count; ++j) sums[r][j] = add ? load_as<V>(c + r * f.c_row + j * wide) : V{};
  for (std::int64_t k = begin; k < end; ++k, a += f.a_depth, b += f.b_depth) {
    V columns[count];
    for (int j = 0; j < count; ++j) columns[j] = load_as<V>(b + j * wide);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < count; ++j) sums[r][j] += columns[j] * a[r * f.a_row];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < count; ++j) store_as(c + r * f.c_row + j * wide, sums[r][j]);
}

// n rows, at most R.
template <class V, int R>
TOPKNOT_INLINE void tiles(const Factors& f, std::int64_t row, std::int64_t n, std::int64_t first,
                          std::int64_t panels, std::int64_t begin, std::int64_t end, bool add) {
  if constexpr (R > 1) {
    if (n < R) return tiles<V, R - 1>(f, row, n, first, panels, begin, end, add);
  }
  for (std::int64_t p = first; p < panels; ++p) tile<V, R>(f, row, p, begin, end, add);
}

template <class V, int R>
TOPKNOT_INLINE void product_of(const Factors& f, const ProductSize& size, Cut cut, std::int64_t shift,
                               bool add) {
  const std::int64_t panels = round_up(size.columns, kPanel) / kPanel;
  for (std::int64_t row = 0; row < size.rows; row += R) {
    const std::int64_t n = std::min<std::int64_t>(R, size.rows - row),
                       first = std::max<std::int64_t>(0, row + shift);
    tiles<V, R>(f, row, n, cut == Cut::columns ? first / kPanel : 0, panels,
                cut == Cut::depth_begin ? first : 0,
                cut == Cut::depth_end ? std::min(size.depth, row + n - shift) : size.depth, add);
  }
}

// 2^x for x up to about 0, relative error below 2e-7; below -126 as for -126. A NaN stays one. The polynomial
// of Moshier's Cephes library (exp2f.c).
template <class V>
TOPKNOT_INLINE V exp2_of(V x) {
  constexpr float kLeast = -126.0f, kRound = 12582912.0f + 127;  // 1.5 * 2^23 + the exponent's bias
  x = x < kLeast ? V{} + kLeast : x;
  const V shifted = x + kRound, r = x - (shifted - kRound);
  V p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  decltype(x < x) bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  V power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Which of a panel's queries, from column `at` on, meet a key.
template <class V>
TOPKNOT_INLINE auto meets(const Block& block, std::int64_t at, std::int64_t key) {
  static constexpr float kIndex[kPanel] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<V>(kIndex) >= V{} + static_cast<float>(key + block.shift - at);
}

// Scores become weights, 2^(score - top).
template <class V>
TOPKNOT_INLINE void softmax_of(const Block& block, float* scores, Softmax& softmax) {
  constexpr std::int64_t wide = sizeof(V) / sizeof(float), count = kPanel / wide;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (std::int64_t panel = 0; panel < block.panels(); ++panel) {
    const std::int64_t all = block.met_by_all(panel), some = block.met_by_one(panel),
                       read = block.read(panel), first = panel * kPanel;
    float* s = scores + first;
    V top[count], before[count], sum[count];
    for (int j = 0; j < count; ++j) top[j] = before[j] = load_as<V>(softmax.top + first + j * wide);
    for (std::int64_t k = 0; k < all; ++k)
      for (int j = 0; j < count; ++j) {
        const V x = load_as<V>(s + k * kBlock + j * wide);
        top[j] = x > top[j] ? x : top[j];
      }
    for (std::int64_t k = all; k < some; ++k)
      for (int j = 0; j < count; ++j) {
        const V x =
            meets<V>(block, first + j * wide, k) ? load_as<V>(s + k * kBlock + j * wide) : V{} + kLowest;
        top[j] = x > top[j] ? x : top[j];
      }
    for (int j = 0; j < count; ++j) {
      const V factor = exp2_of(before[j] - top[j]);
      sum[j] = load_as<V>(softmax.sum + first + j * wide) * factor;
      store_as(softmax.factor + first + j * wide, factor);
      store_as(softmax.top + first + j * wide, top[j]);
    }
    for (std::int64_t k = 0; k < all; ++k)
      for (int j = 0; j < count; ++j) {
        float* at = s + k * kBlock + j * wide;
        const V weight = exp2_of(load_as<V>(at) - top[j]);
        sum[j] += weight;
        store_as(at, weight);
      }
    for (std::int64_t k = all; k < some; ++k)
      for (int j = 0; j < count; ++j) {
        float* at = s + k * kBlock + j * wide;
        const V weight = meets<V>(block, first + j * wide, k) ? exp2_of(load_as<V>(at) - top[j]) : V{};
        sum[j] += weight;
        store_as(at, weight);
      }
    for (std::int64_t k = some; k < read; ++k) store(s + k * kBlock, Lanes{});
    for (int j = 0; j < count; ++j) store_as(softmax.sum + first + j * wide, sum[j]);
  }
}

// P = 2^(S - log_sum) in place of the scores S, and dS = P (dP - D) in place of dP.
template <class V>
TOPKNOT_INLINE void score_gradients_of(const Block& block, const float* log_sum, const float* d,
                                       float* scores, float* grads) {
  constexpr std::int64_t wide = sizeof(V) / sizeof(float), count = kPanel / wide;
  for (std::int64_t panel = 0; panel < block.panels(); ++panel) {
    const std::int64_t all = block.met_by_all(panel), some = block.met_by_one(panel),
                       read = block.read(panel), first = panel * kPanel;
    for (std::int64_t k = 0; k < some; ++k)
      for (int j = 0; j < count; ++j) {
        const std::int64_t column = first + j * wide, at = k * kBlock + column;
        V p = exp2_of(load_as<V>(scores + at) - load_as<V>(log_sum + column));
        V g = p * (load_as<V>(grads + at) - load_as<V>(d + column));
        if (k >= all) {
          const auto met = meets<V>(block, column, k);
          p = met ? p : V{};
          g = met ? g : V{};
        }
        store_as(scores + at, p);
        store_as(grads + at, g);
      }
    for (std::int64_t k = some; k < read; ++k) {
      store(scores + k * kBlock + first, Lanes{});
      store(grads + k * kBlock + first, Lanes{});
    }
  }
}

// n rows of `width` elements, contiguous, each filled up with zeros to whole panels.
template <class T>
TOPKNOT_INLINE void copy_rows_of(const HeadRows<const T>& from, std::int64_t n, std::int64_t width,
                                 float* to) {
  const std::int64_t padded = round_up(width, kPanel);
  for (std::int64_t i = 0; i < n; ++i, to += padded)
    for (std::int64_t c = 0; c < width; c += kPanel)
      store(to + c,
            load_part(from.row(i) + c, static_cast<std::size_t>(std::min<std::int64_t>(kPanel, width - c))));
}

// The same rows times a factor of each, or of all, to where the tensor has them.
template <class T>
TOPKNOT_INLINE void write_rows_of(const float* from, std::int64_t n, std::int64_t width, const float* factors,
                                  std::int64_t factor_step, const HeadRows<T>& to) {
  const std::int64_t padded = round_up(width, kPanel);
  for (std::int64_t i = 0; i < n; ++i, from += padded, factors += factor_step)
    for (std::int64_t c = 0; c < width; c += kPanel)
      store_part(to.row(i) + c, load(from + c) * *factors,
                 static_cast<std::size_t>(std::min<std::int64_t>(kPanel, width - c)));
}

// out[c][r] = rows[r][c] of 8 x 8.
TOPKNOT_INLINE void transpose(const Lanes8* rows, Lanes8* out) {
  Lanes8 pairs[8], fours[8];  // of rows
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      fours[i + 2 * k] = __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * k + 1] =
          __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int c = 0; c < 4; ++c) {
    out[c] = __builtin_shufflevector(fours[c], fours[c + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    out[c + 4] = __builtin_shufflevector(fours[c], fours[c + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

TOPKNOT_INLINE void transpose_rows_of(const float* from, std::int64_t n, std::int64_t width, float factor,
                                      float* to) {
  const std::int64_t padded = round_up(width, kPanel);
  for (std::int64_t i = 0; i < round_up(n, kPanel); i += 8)
    for (std::int64_t c = 0; c < width; c += 8) {
      Lanes8 rows[8], columns[8];
      for (std::int64_t r = 0; r < 8; ++r)
        rows[r] = i + r < n ? load_as<Lanes8>(from + (i + r) * padded + c) * factor : Lanes8{};
      transpose(rows, columns);
      float* out = to + (i / kPanel * width + c) * kPanel + i % kPanel;
      for (std::int64_t k = 0; k < std::min<std::int64_t>(8, width - c); ++k)
        store_as(out + k * kPanel, columns[k]);
    }
}

}  // namespace

TOPKNOT_MULTIVERSION void product(const Factors& f, const ProductSize& size, Cut cut, std::int64_t shift,
                                  bool add) {
  // 12 sums of the 32 or 16 registers that there are; with AVX2 two for each row.
  if (channel_block() == 16) return product_of<Lanes, kMostRows>(f, size, cut, shift, add);
  product_of<Lanes8, kMostRows / 2>(f, size, cut, shift, add);
}

TOPKNOT_MULTIVERSION void softmax_block(const Block& block, float* scores, Softmax& softmax) {
  if (channel_block() == 16) return softmax_of<Lanes>(block, scores, softmax);
  softmax_of<Lanes8>(block, scores, softmax);
}

TOPKNOT_MULTIVERSION void score_gradients(const Block& block, const float* log_sum, const float* d,
                                          float* scores, float* grads) {
  if (channel_block() == 16) return score_gradients_of<Lanes>(block, log_sum, d, scores, grads);
  score_gradients_of<Lanes8>(block, log_sum, d, scores, grads);
}

TOPKNOT_MULTIVERSION void copy_rows(const HeadRows<const float>& from, std::int64_t n, std::int64_t width,
                                    float* to) {
  copy_rows_of(from, n, width, to);
}

TOPKNOT_MULTIVERSION void copy_rows(const HeadRows<const BFloat16>& from, std::int64_t n, std::int64_t width,
                                    float* to) {
  copy_rows_of(from, n, width, to);
}

TOPKNOT_MULTIVERSION void write_rows(const float* from, std::int64_t n, std::int64_t width,
                                     const float* factors, std::int64_t factor_step,
                                     const HeadRows<float>& to) {
  write_rows_of(from, n, width, factors, factor_step, to);
}

TOPKNOT_MULTIVERSION void write_rows(const float* from, std::int64_t n, std::int64_t width,
                                     const float* factors, std::int64_t factor_step,
                                     const HeadRows<BFloat16>& to) {
  write_rows_of(from, n, width, factors, factor_step, to);
}

TOPKNOT_MULTIVERSION void transpose_rows(const float* from, std::int64_t n, std::int64_t width, float factor,
                                         float* to) {
  transpose_rows_of(from, n, width, factor, to);
}

TOPKNOT_MULTIVERSION void scale_rows(float* rows, std::int64_t n, std::int64_t padded, const float* factors) {
  for (std::int64_t i = 0; i < n; ++i, rows += padded)
    for (std::int64_t c = 0; c < padded; ++c) rows[c] *= factors[i];
}

TOPKNOT_MULTIVERSION void row_products(const float* a, const float* b, std::int64_t n, std::int64_t padded,
                                       float* sums) {
  for (std::int64_t i = 0; i < n; ++i) {
    Lanes sum{};
    for (std::int64_t c = 0; c < padded; c += kPanel)
      sum += load(a + i * padded + c) * load(b + i * padded + c);
    float total = 0;
    for (std::size_t l = 0; l < kLanes; ++l) total += sum[l];
    sums[i] = total;
  }
}

}  // namespace topknot::attention_cpu
