// Compiled with fused multiply-adds (nn/CMakeLists.txt). On a Zen 5, which has separate adders, they are
// worth 4 to 8 % with 64 channels and more, and cost 4 to 11 % with 16.
#include "nn/ops/cpu/conv.h"

#include <algorithm>

#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"

namespace topknot {
namespace {

constexpr std::int64_t kOut = 4, kIn = 6;    // sides of a tile
constexpr std::int64_t kPoints = kIn * kIn;  // products of a pair of channels

// A block of channels is a vector V: Lanes, or Lanes8 on CPUs without AVX-512 (channel_block()).
template <class V>
constexpr std::int64_t kWide = sizeof(V) / sizeof(float);

// The three transforms along one side of a tile, and their adjoints.
struct FromInput {  // B^T
  static constexpr std::int64_t from = kIn;
  template <class V>
  TOPKNOT_INLINE static void apply(const V* d, V* t) {
    const V a = d[4] - d[2] * 4.f, b = d[3] - d[1] * 4.f, c = d[4] - d[2], e = (d[3] - d[1]) * 2.f;
    t[0] = d[0] * 4.f - d[2] * 5.f + d[4];
    t[1] = a + b, t[2] = a - b, t[3] = c + e, t[4] = c - e;
    t[5] = d[1] * 4.f - d[3] * 5.f + d[5];
  }
};
struct FromOutputGradient {  // A
  static constexpr std::int64_t from = kOut;
  template <class V>
  TOPKNOT_INLINE static void apply(const V* d, V* t) {
    const V even = d[0] + d[2], odd = d[1] + d[3], far_even = d[0] + d[2] * 4.f,
            far_odd = (d[1] + d[3] * 4.f) * 2.f;
    t[0] = d[0];
    t[1] = even + odd, t[2] = even - odd, t[3] = far_even + far_odd, t[4] = far_even - far_odd;
    t[5] = d[3];
  }
};
template <class V>
TOPKNOT_INLINE void to_output(const V* m, V* y) {  // A^T
  const V s = m[1] + m[2], d = m[1] - m[2], u = m[3] + m[4], v = m[3] - m[4];
  y[0] = m[0] + s + u;
  y[1] = d + v * 2.f;
  y[2] = s + u * 4.f;
  y[3] = d + v * 8.f + m[5];
}
template <class V>
TOPKNOT_INLINE void from_weights(const V* w, V* u) {  // G
  const V ends = w[0] + w[2], wide = w[0] + w[2] * 4.f;
  u[0] = w[0] * 0.25f;
  u[1] = (ends + w[1]) * (-1 / 6.f), u[2] = (ends - w[1]) * (-1 / 6.f);
  u[3] = (wide + w[1] * 2.f) * (1 / 24.f), u[4] = (wide - w[1] * 2.f) * (1 / 24.f);
  u[5] = w[2];
}
template <class V>
TOPKNOT_INLINE void to_weights(const V* u, V* w) {  // G^T
  const V s = u[1] + u[2], d = u[1] - u[2], far_s = u[3] + u[4], far_d = u[3] - u[4];
  w[0] = u[0] * 0.25f - s * (1 / 6.f) + far_s * (1 / 24.f);
  w[1] = d * (-1 / 6.f) + far_d * (1 / 12.f);
  w[2] = u[5] - s * (1 / 6.f) + far_s * (1 / 6.f);
}

// The tiles of a batch, numbered image by image, row by row.
struct Tiles {
  std::int64_t height, width, high, wide, count;
  Tiles(std::int64_t images, std::int64_t height_, std::int64_t width_)
      : height(height_),
        width(width_),
        high((height + kOut - 1) / kOut),
        wide((width + kOut - 1) / kOut),
        count(images * high * wide) {}
};
struct Tile {  // its first output
  Tile(const Tiles& tiles, std::int64_t number)
      : image(number / (tiles.high * tiles.wide)),
        row(number / tiles.wide % tiles.high * kOut),
        column(number % tiles.wide * kOut) {}
  std::int64_t image, row, column;
};

// The transform F of one tile of a block of channels that begins at a row and a column of the image `x`, zero
// outside of it. Point p of the 36 goes to `to` + p * step.
template <class F, class V, class T>
TOPKNOT_INLINE void transform_tile(const Tiles& tiles, const T* x, std::int64_t row, std::int64_t column,
                                   float* to, std::int64_t step) {
  V rows[F::from][kIn], in[F::from], out[kIn];
  const bool inside = column >= 0 && column + F::from <= tiles.width;
  for (std::int64_t i = 0; i < F::from; ++i) {
    const std::int64_t r = row + i;
    if (r < 0 || r >= tiles.height) {
      for (V& v : rows[i]) v = V{};
      continue;
    }
    const T* from = x + (r * tiles.width + column) * kWide<V>;
    if (inside)
      for (std::int64_t j = 0; j < F::from; ++j) in[j] = load_as<V>(from + j * kWide<V>);
    else
      for (std::int64_t j = 0; j < F::from; ++j)
        in[j] = column + j >= 0 && column + j < tiles.width ? load_as<V>(from + j * kWide<V>) : V{};
    F::apply(in, rows[i]);
  }
  for (std::int64_t j = 0; j < kIn; ++j) {
    for (std::int64_t i = 0; i < F::from; ++i) in[i] = rows[i][j];
    F::apply(in, out);
    for (std::int64_t i = 0; i < kIn; ++i) store_as(to + (i * kIn + j) * step, out[i]);
  }
}

// The outputs of one tile of a block of channels, from its points `from` + p * step, to the image `y`.
template <class V, class T>
TOPKNOT_INLINE void output_tile(const Tiles& tiles, const Tile& tile, const float* from, std::int64_t step,
                                T* y, bool accumulate) {
  V columns[kOut][kIn], in[kIn], out[kOut];
  for (std::int64_t j = 0; j < kIn; ++j) {
    for (std::int64_t i = 0; i < kIn; ++i) in[i] = load_as<V>(from + (i * kIn + j) * step);
    to_output(in, out);
    for (std::int64_t i = 0; i < kOut; ++i) columns[i][j] = out[i];
  }
  for (std::int64_t i = 0; i < kOut && tile.row + i < tiles.height; ++i) {
    to_output(columns[i], out);
    T* to = y + ((tile.row + i) * tiles.width + tile.column) * kWide<V>;
    for (std::int64_t j = 0; j < kOut; ++j)
      if (tile.column + j < tiles.width)
        store_as(to + j * kWide<V>, accumulate ? load_as<V>(to + j * kWide<V>) + out[j] : out[j]);
  }
}

// c[r,j] (+)= sum_d a[r,d] b[d,j] for R rows, B blocks of columns. Strides in floats; columns are contiguous.
struct Strides {
  std::int64_t a_row, a_depth, b_depth, c_row;
};
template <class V, int R, int B, bool kAdd>
TOPKNOT_INLINE void product_block(const Strides& s, std::int64_t depth, const float* a, const float* b,
                                  float* c) {
  V sums[R][B];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < B; ++j) sums[r][j] = kAdd ? load_as<V>(c + r * s.c_row + j * kWide<V>) : V{};
  for (std::int64_t d = 0; d < depth; ++d) {
    V row[B];
    for (int j = 0; j < B; ++j) row[j] = load_as<V>(b + d * s.b_depth + j * kWide<V>);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < B; ++j) sums[r][j] += row[j] * a[r * s.a_row + d * s.a_depth];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < B; ++j) store_as(c + r * s.c_row + j * kWide<V>, sums[r][j]);
}

// Tiles at once, a multiple of 16. 32 to 96 are about equally fast, 16 up to a fifth slower.
constexpr std::int64_t kTiles = 64;
constexpr std::int64_t kPadding = 16;
// Floats between two points of kTiles tiles: no multiple of a page, or all 36 fall into a set of the cache.
std::int64_t point_step(std::int64_t channels) {
  return kTiles * channels + kPadding;
}
// The same between two points of a layer's weights. (Where their gradient is read it would cost time.)
std::int64_t weight_step(std::int64_t in, std::int64_t out) {
  return in * out + kPadding;
}
Tensor room_for_points(std::int64_t channels) {
  return Tensor::empty({kPoints * point_step(channels)});
}

// The products of all 36 points are cut into pieces of two blocks of columns, one if no two are left.
std::int64_t pieces(std::int64_t columns) {
  const std::int64_t piece = 2 * channel_block();
  return kPoints * ((columns + piece - 1) / piece);
}
// Pieces [begin, end) of c[p] (+)= a[p] b[p]; rows: a multiple of the block. 16 sums hide the latency of the
// additions and leave registers for the rest; 8 are what the 16 registers without AVX-512 allow.
struct Factors {
  const float *a, *b;
  std::int64_t a_step, b_step, c_step;  // between points
  Strides strides;
  std::int64_t rows, columns, depth;
};
template <class V, bool kAdd>
TOPKNOT_INLINE void products_any(const Factors& f, std::int64_t begin, std::int64_t end, float* c) {
  constexpr std::int64_t piece_columns = 2 * kWide<V>;
  constexpr int sums = kWide<V> == 16 ? 16 : 8;
  const std::int64_t per_point = pieces(f.columns) / kPoints;
  for (std::int64_t piece = begin; piece < end; ++piece) {
    const std::int64_t p = piece / per_point, j = piece % per_point * piece_columns;
    const float *a = f.a + p * f.a_step, *b = f.b + p * f.b_step + j;
    float* to = c + p * f.c_step + j;
    if (j + piece_columns <= f.columns)
      for (std::int64_t r = 0; r < f.rows; r += sums / 2)
        product_block<V, sums / 2, 2, kAdd>(f.strides, f.depth, a + r * f.strides.a_row, b,
                                            to + r * f.strides.c_row);
    else
      for (std::int64_t r = 0; r < f.rows; r += sums)
        product_block<V, sums, 1, kAdd>(f.strides, f.depth, a + r * f.strides.a_row, b,
                                        to + r * f.strides.c_row);
  }
}
TOPKNOT_MULTIVERSION void products(const Factors& f, bool add, std::int64_t begin, std::int64_t end,
                                   float* c) {
  if (channel_block() == 8) {
    if (add) return products_any<Lanes8, true>(f, begin, end, c);
    return products_any<Lanes8, false>(f, begin, end, c);
  }
  if (add) return products_any<Lanes, true>(f, begin, end, c);
  products_any<Lanes, false>(f, begin, end, c);
}

// The points of tiles [begin, end) of a block of tiles that begins at `first`: [point][tile][channel].
template <class F, class V, class T>
TOPKNOT_INLINE void points_any(const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                               std::int64_t channels, const T* x, float* to) {
  constexpr std::int64_t border = F::from == kIn ? 1 : 0;
  for (std::int64_t t = begin; t < end; ++t) {
    const Tile tile(tiles, first + t);
    for (std::int64_t c = 0; c < channels; c += kWide<V>)
      transform_tile<F, V>(tiles, x + (tile.image * channels + c) * tiles.height * tiles.width,
                           tile.row - border, tile.column - border, to + t * channels + c,
                           point_step(channels));
  }
}
TOPKNOT_MULTIVERSION void input_points(const Tiles& tiles, std::int64_t first, std::int64_t begin,
                                       std::int64_t end, std::int64_t channels, DType type, const void* x,
                                       float* to) {
  if (type == DType::bf16)
    return points_any<FromInput, Lanes>(tiles, first, begin, end, channels, static_cast<const BFloat16*>(x),
                                        to);
  const auto* floats = static_cast<const float*>(x);
  if (channel_block() == 8)
    return points_any<FromInput, Lanes8>(tiles, first, begin, end, channels, floats, to);
  points_any<FromInput, Lanes>(tiles, first, begin, end, channels, floats, to);
}
TOPKNOT_MULTIVERSION void gradient_points(const Tiles& tiles, std::int64_t first, std::int64_t begin,
                                          std::int64_t end, std::int64_t channels, DType type, const void* dy,
                                          float* to) {
  if (type == DType::bf16)
    return points_any<FromOutputGradient, Lanes>(tiles, first, begin, end, channels,
                                                 static_cast<const BFloat16*>(dy), to);
  const auto* floats = static_cast<const float*>(dy);
  if (channel_block() == 8)
    return points_any<FromOutputGradient, Lanes8>(tiles, first, begin, end, channels, floats, to);
  points_any<FromOutputGradient, Lanes>(tiles, first, begin, end, channels, floats, to);
}

template <class V, class T>
TOPKNOT_INLINE void outputs_any(const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                                std::int64_t channels, const float* from, T* y, bool accumulate) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Tile tile(tiles, first + t);
    for (std::int64_t c = 0; c < channels; c += kWide<V>)
      output_tile<V>(tiles, tile, from + t * channels + c, point_step(channels),
                     y + (tile.image * channels + c) * tiles.height * tiles.width, accumulate);
  }
}
TOPKNOT_MULTIVERSION void outputs(const Tiles& tiles, std::int64_t first, std::int64_t begin,
                                  std::int64_t end, std::int64_t channels, const float* from, DType type,
                                  void* y, bool accumulate) {
  if (type == DType::bf16)
    return outputs_any<Lanes>(tiles, first, begin, end, channels, from, static_cast<BFloat16*>(y),
                              accumulate);
  auto* floats = static_cast<float*>(y);
  if (channel_block() == 8)
    return outputs_any<Lanes8>(tiles, first, begin, end, channels, from, floats, accumulate);
  outputs_any<Lanes>(tiles, first, begin, end, channels, from, floats, accumulate);
}

// Between a layer's weights, OIHW, and their points, [point][from channel][to channel], by blocks of `to`.
template <class V>
TOPKNOT_INLINE void points_of_weights(const ConvGeometry& g, std::int64_t a, std::int64_t b,
                                      const float* weight, bool turned, float* points) {
  const std::int64_t from = turned ? g.out : g.in, to = turned ? g.in : g.out;
  const std::int64_t from_step = turned ? g.in * 9 : 9, to_step = turned ? 9 : g.in * 9;
  V w[9], rows[3][kIn], in[3], out[kIn];
  for (std::int64_t i = 0; i < kWide<V>; ++i)
    for (std::int64_t tap = 0; tap < 9; ++tap)
      w[tap][i] = weight[a * from_step + (b + i) * to_step + (turned ? 8 - tap : tap)];
  for (int i = 0; i < 3; ++i) from_weights(w + 3 * i, rows[i]);
  for (std::int64_t j = 0; j < kIn; ++j) {
    for (int i = 0; i < 3; ++i) in[i] = rows[i][j];
    from_weights(in, out);
    for (std::int64_t i = 0; i < kIn; ++i)
      store_as(points + (i * kIn + j) * weight_step(from, to) + a * to + b, out[i]);
  }
}
template <class V>
TOPKNOT_INLINE void transform_weights_any(const ConvGeometry& g, std::int64_t first, std::int64_t last,
                                          const float* weight, bool turned, float* points) {
  for (std::int64_t a = first; a < last; ++a)
    for (std::int64_t b = 0; b < (turned ? g.in : g.out); b += kWide<V>)
      points_of_weights<V>(g, a, b, weight, turned, points);
}
TOPKNOT_MULTIVERSION void transform_weights(const ConvGeometry& g, std::int64_t first, std::int64_t last,
                                            const float* weight, bool turned, float* points) {
  if (channel_block() == 8) return transform_weights_any<Lanes8>(g, first, last, weight, turned, points);
  transform_weights_any<Lanes>(g, first, last, weight, turned, points);
}

// The points of `sums` are added up.
template <class V>
TOPKNOT_INLINE void weights_of_points(const ConvGeometry& g, std::int64_t a, std::int64_t b,
                                      const std::vector<Tensor>& sums, GradientTarget target) {
  V columns[3][kIn], in[kIn], out[3];
  for (std::int64_t j = 0; j < kIn; ++j) {
    for (std::int64_t i = 0; i < kIn; ++i) {
      in[i] = V{};
      for (const Tensor& sum : sums)
        if (sum.defined()) in[i] += load_as<V>(sum.data() + ((i * kIn + j) * g.in + a) * g.out + b);
    }
    to_weights(in, out);
    for (int i = 0; i < 3; ++i) columns[i][j] = out[i];
  }
  for (int i = 0; i < 3; ++i) {
    to_weights(columns[i], out);
    for (int j = 0; j < 3; ++j)
      for (std::int64_t lane = 0; lane < kWide<V>; ++lane) {
        float& dw = target.data[((b + lane) * g.in + a) * 9 + i * 3 + j];
        dw = target.accumulate ? dw + out[j][lane] : out[j][lane];
      }
  }
}
template <class V>
TOPKNOT_INLINE void gradient_from_points_any(const ConvGeometry& g, std::int64_t first, std::int64_t last,
                                             const std::vector<Tensor>& sums, GradientTarget target) {
  for (std::int64_t a = first; a < last; ++a)
    for (std::int64_t b = 0; b < g.out; b += kWide<V>) weights_of_points<V>(g, a, b, sums, target);
}
TOPKNOT_MULTIVERSION void gradient_from_points(const ConvGeometry& g, std::int64_t first, std::int64_t last,
                                               const std::vector<Tensor>& sums, GradientTarget target) {
  if (channel_block() == 8) return gradient_from_points_any<Lanes8>(g, first, last, sums, target);
  gradient_from_points_any<Lanes>(g, first, last, sums, target);
}

// The least pixels, of all images of the batch together, that pay for the transformation of the weights.
// Measured on VGG-16 and ResNet-20 (lab/records/speed_steps.md).
constexpr std::int64_t kPixels = 400, kPixelsBfloat16 = 2000;

// Images of the same size, with the numbers of channels before and after.
struct Batch {
  std::int64_t images, in, out, height, width;
  DType type;
};

// Runs fn(begin, end) over [0, n), in the calling thread or in all.
void split(bool parallel, std::int64_t n, const auto& fn) {
  if (parallel)
    parallel_ranges(n, [&](int, std::int64_t begin, std::int64_t end) { fn(begin, end); });
  else
    fn(0, n);
}

// y (+)= conv(x) with transformed weights.
void convolve(const Batch& b, bool parallel, const void* x, const float* weights, void* y, bool accumulate) {
  const Tiles tiles(b.images, b.height, b.width);
  Tensor in = room_for_points(b.in), out = room_for_points(b.out);
  for (std::int64_t first = 0; first < tiles.count; first += kTiles) {
    const std::int64_t count = std::min(kTiles, tiles.count - first);
    const Factors factors{.a = in.data(),
                          .b = weights,
                          .a_step = point_step(b.in),
                          .b_step = weight_step(b.in, b.out),
                          .c_step = point_step(b.out),
                          .strides = {.a_row = b.in, .a_depth = 1, .b_depth = b.out, .c_row = b.out},
                          .rows = (count + 15) / 16 * 16,  // what the last rows hold is not used
                          .columns = b.out,
                          .depth = b.in};
    split(parallel, count, [&](std::int64_t begin, std::int64_t end) {
      input_points(tiles, first, begin, end, b.in, b.type, x, in.data());
    });
    split(parallel, pieces(b.out),
          [&](std::int64_t begin, std::int64_t end) { products(factors, false, begin, end, out.data()); });
    split(parallel, count, [&](std::int64_t begin, std::int64_t end) {
      outputs(tiles, first, begin, end, b.out, out.data(), b.type, y, accumulate);
    });
  }
}

// The transformed weights' gradient, or its sum with what `sums` holds.
void weight_gradient_points(const Batch& b, bool parallel, const void* x, const void* dy, float* sums,
                            bool add) {
  const Tiles tiles(b.images, b.height, b.width);
  Tensor in = room_for_points(b.in), out = room_for_points(b.out);
  for (std::int64_t first = 0; first < tiles.count; first += kTiles) {
    const std::int64_t count = std::min(kTiles, tiles.count - first);
    const Factors factors{.a = in.data(),
                          .b = out.data(),
                          .a_step = point_step(b.in),
                          .b_step = point_step(b.out),
                          .c_step = b.in * b.out,
                          .strides = {.a_row = 1, .a_depth = b.in, .b_depth = b.out, .c_row = b.out},
                          .rows = b.in,
                          .columns = b.out,
                          .depth = count};
    split(parallel, count, [&](std::int64_t begin, std::int64_t end) {
      input_points(tiles, first, begin, end, b.in, b.type, x, in.data());
      gradient_points(tiles, first, begin, end, b.out, b.type, dy, out.data());
    });
    split(parallel, pieces(b.out), [&](std::int64_t begin, std::int64_t end) {
      products(factors, add || first > 0, begin, end, sums);
    });
  }
}

std::int64_t bytes_of(const Tensor& t, std::int64_t elements) {
  return elements * static_cast<std::int64_t>(size_of(t.dtype()));
}

}  // namespace

bool WinogradConv::serves(const Tensor& x) const {
  const bool geometry = g_.kernel == 3 && g_.stride == 1 && g_.padding == 1 && g_.groups == 1 &&
                        g_.in % channel_block() == 0 && g_.out % channel_block() == 0;
  if (!geometry || std::min(x.dim(2), x.dim(3)) < kOut) return false;
  const std::int64_t pixels = x.dim(0) * x.dim(2) * x.dim(3);
  // With 16 channels the transforms cost as much as the products, and oneDNN's products of bf16 are faster.
  if (x.dtype() == DType::bf16)
    return channel_block() == kWide<Lanes> && pixels >= kPixelsBfloat16 && g_.in * g_.out > 16 * 16;
  return pixels >= kPixels;
}

bool WinogradConv::shared(const Tensor& x) const {
  return g_.in * g_.out > kNarrow || x.dim(0) < team_size();
}

void WinogradConv::forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const {
  Tensor points = weight_points(weight, false);
  const std::int64_t in = bytes_of(x, x.numel() / x.dim(0)), out = bytes_of(y, y.numel() / y.dim(0));
  if (shared(x)) {
    convolve({x.dim(0), g_.in, g_.out, x.dim(2), x.dim(3), x.dtype()}, true, x.as<std::byte>(), points.data(),
             y.as<std::byte>(), false);
    if (after)
      parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) { after(begin, end); });
    return;
  }
  const std::int64_t chunk = images_per_chunk(g_, x);
  parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin, count; n < end; n += count) {
      count = std::min(chunk, end - n);
      convolve({count, g_.in, g_.out, x.dim(2), x.dim(3), x.dtype()}, false, x.as<std::byte>() + n * in,
               points.data(), y.as<std::byte>() + n * out, false);
      if (after) after(n, n + count);
    }
  });
}

void WinogradConv::backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                            GradientTarget weight_gradient, InputGradient& input_gradient) const {
  const std::int64_t images = x.dim(0), pixels = x.dim(2) * x.dim(3), in = bytes_of(x, g_.in * pixels),
                     out = bytes_of(x, g_.out * pixels);
  Tensor points;
  if (input_gradient.tensor.defined()) points = weight_points(weight, true);
  const bool one = shared(x);
  std::vector<Tensor> sums(static_cast<std::size_t>(one ? 1 : team_size()));  // by thread
  // Handles images [n, n + count), in the calling thread or in all.
  const auto work = [&](bool parallel, std::int64_t n, std::int64_t count, const void* dy, Tensor& sum) {
    const Batch batch{count, g_.in, g_.out, x.dim(2), x.dim(3), x.dtype()};
    if (weight_gradient.data) {
      const bool add = sum.defined();
      if (!add) sum = Tensor::empty({kPoints * g_.in * g_.out});
      weight_gradient_points(batch, parallel, x.as<std::byte>() + n * in, dy, sum.data(), add);
    }
    if (points.defined())
      convolve({count, g_.out, g_.in, x.dim(2), x.dim(3), x.dtype()}, parallel, dy, points.data(),
               input_gradient.tensor.as<std::byte>() + n * in, input_gradient.accumulate);
  };
  const auto room = [&](std::int64_t count) {
    return grad.defined() ? Tensor() : Tensor::empty({count, g_.out * pixels}, Layout::plain, {}, x.dtype());
  };
  if (one) {
    Tensor filled = room(images);
    if (filled.defined())
      parallel_ranges(images, [&](int, std::int64_t begin, std::int64_t end) {
        fill(begin, end, filled.as<std::byte>() + begin * out);
      });
    work(true, 0, images, filled.defined() ? filled.as<std::byte>() : grad.as<std::byte>(), sums[0]);
  } else {
    parallel_ranges(images, [&](int thread, std::int64_t begin, std::int64_t end) {
      const std::int64_t chunk = std::min(images_per_chunk(g_, x), end - begin);
      Tensor filled = room(chunk);
      for (std::int64_t n = begin, count; n < end; n += count) {
        count = std::min(chunk, end - n);
        if (filled.defined()) fill(n, n + count, filled.data());
        work(false, n, count, filled.defined() ? filled.as<std::byte>() : grad.as<std::byte>() + n * out,
             sums[static_cast<std::size_t>(thread)]);
      }
    });
  }
  if (!weight_gradient.data) return;
  parallel_ranges(g_.in, [&](int, std::int64_t first, std::int64_t last) {
    gradient_from_points(g_, first, last, sums, weight_gradient);
  });
}

Tensor WinogradConv::weight_points(const float* weight, bool input_gradient) const {
  Tensor points = Tensor::empty({kPoints * weight_step(g_.in, g_.out)});
  parallel_ranges(input_gradient ? g_.out : g_.in, [&](int, std::int64_t first, std::int64_t last) {
    transform_weights(g_, first, last, weight, input_gradient, points.data());
  });
  return points;
}

}  // namespace topknot
