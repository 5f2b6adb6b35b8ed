// Muon's step of one matrix on a CPU. An element of a product is added up term by term in order, by a tile of
// four rows and sixteen columns at a time, so that the bits depend neither on the number of threads nor on
// the instruction set: ranks on different machines must make the same step, and a library's products differ
// between them. Products and sums are rounded one by one (-ffp-contract=off).
//
// X is kept as the tall one of itself and its transpose, Y [m, n] with m >= n: A = Y^T Y, Y = a Y + Y B with
// B = b A + c A^T A. All matrices lie in panels of sixteen columns, which is the order in which a product
// reads either operand. The lower half of a symmetric product is computed, by blocks.

#include <algorithm>
#include <cstdint>

#include "nn/core/device.h"
#include "nn/core/simd.h"
#include "optim/clip.h"
#include "optim/muon.h"

namespace topknot {
namespace {

constexpr std::size_t kTileRows = 4;
constexpr std::size_t kShare = 64;   // rows and columns of a thread's share of a product
constexpr std::size_t kDepth = 128;  // terms that are added to a block at a time; its operands stay in caches

constexpr std::size_t rounded_up(std::size_t n, std::size_t by) {
  return (n + by - 1) / by * by;
}

// A matrix of [rows, cols]: element (i, j) at panel(j / 16)[16 * i + j % 16]. The last panel's rest is zero,
// and so are rows up to a multiple of sixteen when first filled, of four in a product.
struct Panels {
  float* data;
  std::size_t rows, cols;

  std::size_t count() const { return rounded_up(cols, kLanes) / kLanes; }
  // Four rows more, so that panels of 64 rows and their multiples do not fall on the same sets of a cache.
  std::size_t panel_size() const { return (rounded_up(rows, kLanes) + kTileRows) * kLanes; }
  std::size_t size() const { return count() * panel_size(); }
  float* panel(std::size_t p) const { return data + p * panel_size(); }
  float& at(std::size_t i, std::size_t j) const { return panel(j / kLanes)[kLanes * i + j % kLanes]; }
};

// The four matrices of an iteration in a step's scratch.
struct Scratch {
  Scratch(std::size_t rows, std::size_t cols, float* memory)
      : y{memory, std::max(rows, cols), std::min(rows, cols)},
        next{memory + y.size(), y.rows, y.cols},
        a{next.data + next.size(), y.cols, y.cols},
        b{a.data + a.size(), y.cols, y.cols} {}
  std::size_t size() const { return 2 * (y.size() + a.size()); }
  Panels y, next, a, b;
};

// The part of a row-major matrix in a square of sixteen.
struct Square {
  std::size_t row, col, rows, cols;
};

// fn(square) for the squares of a panel of Y; `tall`: Y is the matrix, else its transpose.
TOPKNOT_INLINE void for_squares(const MuonMatrix& m, bool tall, std::size_t panel, const auto& fn) {
  const std::size_t across = panel * kLanes;
  for (std::size_t along = 0; along < (tall ? m.rows : m.cols); along += kLanes) {
    const std::size_t row = tall ? along : across, col = tall ? across : along;
    fn(Square{row, col, std::min(kLanes, m.rows - row), std::min(kLanes, m.cols - col)});
  }
}

TOPKNOT_INLINE void fill_square(const MuonMatrix& m, const MuonMix& mix, float gradient_scale, bool tall,
                                const Square& s, float* panel) {
  float input[kLanes][kLanes] = {};
  for (std::size_t i = 0; i < s.rows; ++i) {
    const std::size_t at = (s.row + i) * m.cols + s.col;
    Lanes momentum = load_part(m.momentum + at, s.cols);
    store(input[i], mix.input(momentum, load_part(m.gradient + at, s.cols) * gradient_scale));
    store_part(m.momentum + at, momentum, s.cols);
  }
  float* const to = panel + (tall ? s.row : s.col) * kLanes;
  for (std::size_t i = 0; i < kLanes; ++i)
    for (std::size_t j = 0; j < kLanes; ++j) to[kLanes * i + j] = tall ? input[i][j] : input[j][i];
}

// M, and its panel of Y before that is divided by its norm.
TOPKNOT_MULTIVERSION void fill_panel(const MuonMatrix& m, const MuonMix& mix, float gradient_scale,
                                     const Panels& y, std::size_t p) {
  const bool tall = m.rows > m.cols;
  float* const panel = y.panel(p);
  std::fill(panel + y.panel_size() - kTileRows * kLanes, panel + y.panel_size(), 0.0f);
  for_squares(
      m, tall, p, [&](const Square& s) __attribute__((always_inline)) {
        fill_square(m, mix, gradient_scale, tall, s, panel);
      });
}

TOPKNOT_MULTIVERSION void step_panel(const MuonMatrix& m, const MuonRates& rates, const Panels& y,
                                     std::size_t p) {
  const bool tall = m.rows > m.cols;
  for_squares(
      m, tall, p, [&](const Square& s) __attribute__((always_inline)) {
        const float* const from = y.panel(p) + (tall ? s.row : s.col) * kLanes;
        for (std::size_t i = 0; i < s.rows; ++i)
          for (std::size_t j = 0; j < s.cols; ++j) {
            float& weight = m.weights[(s.row + i) * m.cols + s.col + j];
            weight = rates.decay * weight - rates.rate * (tall ? from[kLanes * i + j] : from[kLanes * j + i]);
          }
      });
}

// A thread's sums: elements [row, row + rows) x [col, col + cols), multiples of sixteen but at the end.
struct Block {
  std::size_t row, rows, col, cols;
  float sums[kShare][kShare];
};

Block block_of(std::size_t row, std::size_t rows, std::size_t col, std::size_t cols) {
  return {row, std::min(kShare, rows - row), col, std::min(kShare, cols - col), {}};
}

// Four rows of two halves, which every machine keeps in registers; AVX2 would keep 64 bytes in memory.
struct Tile {
  Lanes8 sums[kTileRows][2];

  // Sums of left[r * stride] times sixteen factors.
  TOPKNOT_INLINE void add(const float* left, std::size_t stride, const float* right) {
    const Lanes8 first = load_as<Lanes8>(right), second = load_as<Lanes8>(right + kLanes / 2);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kTileRows; ++r) {
      sums[r][0] += left[r * stride] * first;
      sums[r][1] += left[r * stride] * second;
    }
  }
};

// add(i, j, tile) for each tile; i and j from the block's corner on.
TOPKNOT_INLINE void for_tiles(Block& block, const auto& add) {
  for (std::size_t j = 0; j < block.cols; j += kLanes)
    for (std::size_t i = 0; i < block.rows; i += kTileRows) {
      Tile tile;
#pragma GCC unroll 4
      for (std::size_t r = 0; r < kTileRows; ++r)
        for (std::size_t half : {0, 1})
          tile.sums[r][half] = load_as<Lanes8>(&block.sums[i + r][j + 8 * half]);
      add(i, j, tile);
#pragma GCC unroll 4
      for (std::size_t r = 0; r < kTileRows; ++r)
        for (std::size_t half : {0, 1}) store_as(&block.sums[i + r][j + 8 * half], tile.sums[r][half]);
    }
}

// Adds a block of Y^T Y.
TOPKNOT_MULTIVERSION void add_gram(const Panels& y, Block& block) {
  for (std::size_t begin = 0; begin < y.rows; begin += kDepth) {
    const std::size_t depth = std::min(kDepth, y.rows - begin);
    for_tiles(
        block, [&](std::size_t i, std::size_t j, Tile & tile) __attribute__((always_inline)) {
          const std::size_t column = block.row + i;
          const float* left = y.panel(column / kLanes) + kLanes * begin + column % kLanes;
          const float* right = y.panel((block.col + j) / kLanes) + kLanes * begin;
          Tile sums = tile;
          for (std::size_t k = 0; k < depth; ++k, left += kLanes, right += kLanes) sums.add(left, 1, right);
          tile = sums;
        });
  }
}

// Adds a block of Y B.
TOPKNOT_MULTIVERSION void add_product(const Panels& y, const Panels& b, Block& block) {
  constexpr std::size_t kPanels = kDepth / kLanes;
  for (std::size_t begin = 0; begin < y.count(); begin += kPanels) {
    const std::size_t end = std::min(y.count(), begin + kPanels);
    for_tiles(
        block, [&](std::size_t i, std::size_t j, Tile & tile) __attribute__((always_inline)) {
          const float* right = b.panel((block.col + j) / kLanes) + kLanes * kLanes * begin;
          Tile sums = tile;
          for (std::size_t p = begin; p < end; ++p) {
            const float* const left = y.panel(p) + kLanes * (block.row + i);
            for (std::size_t k = 0; k < kLanes; ++k, right += kLanes) sums.add(left + k, kLanes, right);
          }
          tile = sums;
        });
  }
}

// result = of_old * old + of_gram * Y^T Y, symmetric as old is; old is not read if of_old is 0.
void gram(const Panels& y, float of_gram, const Panels& old, float of_old, const Panels& result) {
  const std::size_t n = y.count() * kLanes;
  const auto blocks = static_cast<std::int64_t>(rounded_up(n, kShare) / kShare);
  const std::int64_t shares = blocks * (blocks + 1) / 2;
#pragma omp parallel for schedule(dynamic) if (shares > 1)
  for (std::int64_t share = 0; share < shares; ++share) {
    std::int64_t row = 0;
    while ((row + 1) * (row + 2) / 2 <= share) ++row;
    const std::int64_t column = share - row * (row + 1) / 2;
    Block block =
        block_of(kShare * static_cast<std::size_t>(row), n, kShare * static_cast<std::size_t>(column), n);
    add_gram(y, block);
    for (std::size_t i = 0; i < block.rows; ++i)
      for (std::size_t j = 0; j < block.cols; ++j) {
        float value = of_gram * block.sums[i][j];
        if (of_old != 0) value += of_old * old.at(block.row + i, block.col + j);
        result.at(block.row + i, block.col + j) = value;
        if (row != column) result.at(block.col + j, block.row + i) = value;
      }
  }
}

// result = of_y * Y + Y B
void product(const Panels& y, float of_y, const Panels& b, const Panels& result) {
  const std::size_t n = y.count() * kLanes, m = rounded_up(y.rows, kTileRows);
  const std::size_t across = rounded_up(n, kShare) / kShare;
  const auto shares = static_cast<std::int64_t>(across * (rounded_up(m, kShare) / kShare));
#pragma omp parallel for schedule(dynamic) if (shares > 1)
  for (std::int64_t share = 0; share < shares; ++share) {
    const auto s = static_cast<std::size_t>(share);
    Block block = block_of(s / across * kShare, m, s % across * kShare, n);
    add_product(y, b, block);
    for (std::size_t i = 0; i < block.rows; ++i)
      for (std::size_t j = 0; j < block.cols; ++j) {
        const std::size_t row = block.row + i, column = block.col + j;
        result.at(row, column) = of_y * y.at(row, column) + block.sums[i][j];
      }
  }
}

void muon_update(const MuonMatrix& matrix, const MuonRule& rule, float* memory, const StepState& state) {
  if (state.status && state.status->bad) return;
  const StepParameters& now = *state.parameters;
  Scratch scratch(matrix.rows, matrix.cols, memory);
  Panels &y = scratch.y, &next = scratch.next;
  const MuonMix mix(rule);
  const MuonRates rates(rule, matrix.shape_factor, now.lr);
  const auto panels = static_cast<std::int64_t>(y.count());
  constexpr std::size_t kParallel = 1 << 14;  // elements
  const bool parallel = matrix.rows * matrix.cols >= kParallel;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t p = 0; p < panels; ++p)
    fill_panel(matrix, mix, static_cast<float>(now.gradient_scale), y, static_cast<std::size_t>(p));
  const std::span<float> all(y.data, y.size());
  scale(all, 1 / (l2_norm(all) + rule.epsilon));
  for (const auto& [of_y, of_a, of_square] : rule.factors) {
    gram(y, 1, {}, 0, scratch.a);
    gram(scratch.a, of_square, scratch.a, of_a, scratch.b);
    product(y, of_y, scratch.b, next);
    std::swap(y, next);
  }
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t p = 0; p < panels; ++p) step_panel(matrix, rates, y, static_cast<std::size_t>(p));
}

const bool muon_kernels = add_cpu_kernels<MuonKernels>(
    {[](std::size_t rows, std::size_t cols) { return Scratch(rows, cols, nullptr).size(); }, muon_update});

}  // namespace
}  // namespace topknot
