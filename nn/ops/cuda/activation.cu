#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/activation_kernels.h"

namespace topknot::cuda {
namespace {

using BF16 = __nv_bfloat16;
constexpr int kTile = 32, kRows = kThreads / kTile;

// A block a tile; tiles of one image side by side, so that what is read in part is still in the L2 cache.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const In* in, Out* out, std::size_t rows, std::size_t columns,
                     std::uint32_t tiles_across, std::uint32_t tiles_an_image) {
  __shared__ float tile[kTile][kTile + 1];
  const std::uint32_t image = blockIdx.x / tiles_an_image, place = blockIdx.x % tiles_an_image;
  const std::size_t row0 = std::size_t{place / tiles_across} * kTile,
                    column0 = std::size_t{place % tiles_across} * kTile;
  const std::size_t x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  in += image * rows * columns;
  out += image * rows * columns;
  for (std::size_t j = y; j < kTile; j += kRows)
    if (row0 + j < rows && column0 + x < columns)
      tile[j][x] = as_float(in[(row0 + j) * columns + column0 + x]);
  __syncthreads();
  for (std::size_t j = y; j < kTile; j += kRows)
    if (column0 + j < columns && row0 + x < rows)
      out[(column0 + j) * rows + row0 + x] = from_float<Out>(tile[x][j]);
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) convert_kernel(const In* in, Out* out, std::size_t n) {
  std::size_t i = std::size_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  for (int j = 0; j < 4; ++j, i += kThreads)
    if (i < n) out[i] = from_float<Out>(as_float(in[i]));
}

template <class In, class Out>
void transpose_as(cudaStream_t stream, const void* in, void* out, std::size_t images, std::size_t rows,
                  std::size_t columns) {
  const std::size_t across = ceil_div(columns, kTile), tiles = across * ceil_div(rows, kTile);
  launch(transpose_kernel<In, Out>, grid_for(images * tiles, 1), kThreads, stream, static_cast<const In*>(in),
         static_cast<Out*>(out), rows, columns, across, tiles);
}

template <class In, class Out>
void convert_as(cudaStream_t stream, const void* in, void* out, std::size_t n) {
  launch(convert_kernel<In, Out>, grid_for(n, kThreads * 4), kThreads, stream, static_cast<const In*>(in),
         static_cast<Out*>(out), n);
}

// A word W is one element, or several channels side by side; channels are counted in words.
template <class W>
__global__ void __launch_bounds__(kThreads)
    subsample_kernel(const W* x, W* y, ShortcutShape s, std::uint32_t words) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= words) return;
  const std::uint32_t to = static_cast<std::uint32_t>(at), c = to % s.wide - s.shift, pixel = to / s.wide;
  W word{};
  if (c < s.narrow) {  // a negative c is a large one
    const std::uint32_t width = (s.width + 1) / 2, height = (s.height + 1) / 2;
    const std::uint32_t j = pixel % width, i = pixel / width % height, n = pixel / width / height;
    word = x[(std::size_t{n * s.height + 2 * i} * s.width + 2 * j) * s.narrow + c];
  }
  y[to] = word;
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    subsample_backward_kernel(const W* dy, W* dx, ShortcutShape s, std::uint32_t words) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= words) return;
  const std::uint32_t to = static_cast<std::uint32_t>(at), c = to % s.narrow, pixel = to / s.narrow;
  const std::uint32_t j = pixel % s.width, i = pixel / s.width % s.height, n = pixel / s.width / s.height;
  W word{};
  if (i % 2 == 0 && j % 2 == 0) {
    const std::uint32_t width = (s.width + 1) / 2, height = (s.height + 1) / 2;
    word = dy[(std::size_t{n * height + i / 2} * width + j / 2) * s.wide + s.shift + c];
  }
  dx[to] = word;
}

template <class W>
void subsample_words(cudaStream_t stream, bool forward, const void* in, void* out, ShortcutShape s,
                     std::uint32_t elements_a_word) {
  s.narrow /= elements_a_word, s.wide /= elements_a_word, s.shift /= elements_a_word;
  const std::size_t small = std::size_t{s.images} * ((s.height + 1) / 2) * ((s.width + 1) / 2) * s.wide,
                    large = std::size_t{s.images} * s.height * s.width * s.narrow;
  const std::size_t words = forward ? small : large;
  if (words > 0)
    launch(forward ? subsample_kernel<W> : subsample_backward_kernel<W>, grid_for(words, kThreads), kThreads,
           stream, static_cast<const W*>(in), static_cast<W*>(out), s, words);
}

void subsample(cudaStream_t stream, bool forward, const void* in, void* out, ShortcutShape s,
               std::size_t element) {
  const std::uint32_t wide_word = static_cast<std::uint32_t>(16 / element);
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out)) % 16 == 0;
  if (aligned && s.narrow % wide_word == 0 && s.wide % wide_word == 0 && s.shift % wide_word == 0)
    subsample_words<uint4>(stream, forward, in, out, s, wide_word);
  else if (element == 4)
    subsample_words<std::uint32_t>(stream, forward, in, out, s, 1);
  else
    subsample_words<std::uint16_t>(stream, forward, in, out, s, 1);
}

}  // namespace

void transpose(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16,
               std::size_t images, std::size_t rows, std::size_t columns) {
  if (images * rows * columns == 0) return;
  if (in_bf16)
    (out_bf16 ? transpose_as<BF16, BF16> : transpose_as<BF16, float>)(stream, in, out, images, rows, columns);
  else
    (out_bf16 ? transpose_as<float, BF16> : transpose_as<float, float>)(stream, in, out, images, rows,
                                                                        columns);
}

void convert(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16, std::size_t n) {
  if (n == 0) return;
  if (in_bf16)
    (out_bf16 ? convert_as<BF16, BF16> : convert_as<BF16, float>)(stream, in, out, n);
  else
    (out_bf16 ? convert_as<float, BF16> : convert_as<float, float>)(stream, in, out, n);
}

void subsample_forward(cudaStream_t stream, const void* x, void* y, ShortcutShape shape,
                       std::size_t element) {
  subsample(stream, true, x, y, shape, element);
}

void subsample_backward(cudaStream_t stream, const void* dy, void* dx, ShortcutShape shape,
                        std::size_t element) {
  subsample(stream, false, dy, dx, shape, element);
}

}  // namespace topknot::cuda
