#include "nn/ops/cpu/conv.h"

#include <algorithm>

#include "nn/core/simd.h"

namespace topknot {
namespace {

// Outputs [first, last) of `size` whose input at tap `t` lies inside an image of `in` pixels.
struct TapRange {
  TapRange(std::int64_t t, std::int64_t stride, std::int64_t padding, std::int64_t in, std::int64_t size)
      : first(padding > t ? (padding - t + stride - 1) / stride : 0),
        last(std::min(size, in + padding > t ? (in + padding - t - 1) / stride + 1 : 0)) {}
  std::int64_t first, last;
};

// Sums a block of channels, V lanes wide, row by row; x and dy: that block of the first image.
template <class V>
TOPKNOT_INLINE void depthwise_block(const ConvGeometry& g, const Shape& in, const Shape& out,
                                    std::int64_t x_image, std::int64_t y_image, const float* x,
                                    const float* dy, float* sums) {
  constexpr std::int64_t L = sizeof(V) / sizeof(float);
  const std::int64_t s = g.stride.width;
  for (std::int64_t p = 0; p < g.kernel.height; ++p)
    for (std::int64_t q = 0; q < g.kernel.width; ++q, sums += L) {
      const TapRange rows(p, g.stride.height, g.padding.height, in[2], out[2]),
          columns(q, s, g.padding.width, in[3], out[3]);
      V total{};
      for (std::int64_t n = 0; n < in[0]; ++n)
        for (std::int64_t i = rows.first; i < rows.last; ++i) {
          const float* from =
              x + n * x_image +
              ((i * g.stride.height + p - g.padding.height) * in[3] + q - g.padding.width) * L;
          const float* grad = dy + n * y_image + i * out[3] * L;
          V a{}, b{}, c{}, d{};
          std::int64_t j = columns.first;
          for (; j + 4 <= columns.last; j += 4) {
            a += load_as<V>(grad + j * L) * load_as<V>(from + j * s * L);
            b += load_as<V>(grad + (j + 1) * L) * load_as<V>(from + (j + 1) * s * L);
            c += load_as<V>(grad + (j + 2) * L) * load_as<V>(from + (j + 2) * s * L);
            d += load_as<V>(grad + (j + 3) * L) * load_as<V>(from + (j + 3) * s * L);
          }
          for (; j < columns.last; ++j) a += load_as<V>(grad + j * L) * load_as<V>(from + j * s * L);
          total += (a + b) + (c + d);
        }
      store_as<V>(sums, total);
    }
}

TOPKNOT_MULTIVERSION void depthwise_sums(const ConvGeometry& g, const Shape& in, const Shape& out,
                                         std::int64_t x_image, std::int64_t y_image, const float* x,
                                         const float* dy, float* sums) {
  if (channel_block() == 16) return depthwise_block<Lanes>(g, in, out, x_image, y_image, x, dy, sums);
  depthwise_block<Lanes8>(g, in, out, x_image, y_image, x, dy, sums);
}

}  // namespace

void depthwise_weight_gradient(const ConvGeometry& g, const Shape& shape, const float* x, const float* dy,
                               float* dw) {
  const std::int64_t block = channel_block(), blocks = (g.in + block - 1) / block,
                     taps = g.kernel.height * g.kernel.width;
  const Shape out = g.output_shape(shape);
  const std::int64_t x_block = shape[2] * shape[3] * block, y_block = out[2] * out[3] * block;
  std::vector<float> sums(static_cast<std::size_t>(taps * block));
  for (std::int64_t b = 0; b < blocks; ++b) {
    depthwise_sums(g, shape, out, blocks * x_block, blocks * y_block, x + b * x_block, dy + b * y_block,
                   sums.data());
    for (std::int64_t c = b * block; c < std::min(g.in, (b + 1) * block); ++c)
      for (std::int64_t t = 0; t < taps; ++t)
        dw[c * taps + t] = sums[static_cast<std::size_t>(t * block + c % block)];
  }
}

}  // namespace topknot
