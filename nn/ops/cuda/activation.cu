#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/activation_kernels.h"

namespace topknot::cuda {
namespace {

using BF16 = __nv_bfloat16;
constexpr int kTile = 32, kRows = kThreads / kTile;

// One block per tile. The tiles of an image are side by side, so that what is read in part is still in the L2 cache.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const In* in, Out* out, std::size_t rows, std::size_t columns,
                     std::uint32_t tiles_across, std::uint32_t tiles_per_image) {
  __shared__ float tile[kTile][kTile + 1];
  const std::uint32_t image = blockIdx.x / tiles_per_image, place = blockIdx.x % tiles_per_image;
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
                     std::uint32_t elements_per_word) {
  s.narrow /= elements_per_word, s.wide /= elements_per_word, s.shift /= elements_per_word;
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

// Elements side by side that are sent as one word.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

template <int kSize, class T>
bool packed(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * kSize) == 0;
}

struct Relu {  // the comparison lets a NaN through
  __device__ float operator()(float x, float) const { return x <= 0 ? 0 : x; }
};
struct ReluGradient {
  __device__ float operator()(float y, float dy) const { return y <= 0 ? 0 : dy; }
};
template <class Rule>
struct Activate {
  Rule rule;
  __device__ float operator()(float x, float) const { return rule.value(x); }
};
template <class Rule>
struct ActivateGradient {
  Rule rule;
  __device__ float operator()(float x, float dy) const { return dy * rule.slope(x); }
};

// Items below `packs` are packs, the others the single elements after them.
template <class T, class Fn>
__global__ void __launch_bounds__(kThreads)
    map_kernel(Fn fn, const T* a, const T* b, T* out, std::size_t packs, std::size_t n) {
  constexpr int kSize = 16 / sizeof(T);
  using P = Pack<T, kSize>;
  const std::size_t item = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item < packs) {
    const P p = reinterpret_cast<const P*>(a)[item], q = reinterpret_cast<const P*>(b)[item];
    P r;
    for (int j = 0; j < kSize; ++j)
      r.values[j] = from_float<T>(fn(as_float(p.values[j]), as_float(q.values[j])));
    reinterpret_cast<P*>(out)[item] = r;
    return;
  }
  const std::size_t i = packs * kSize + (item - packs);
  if (i < n) out[i] = from_float<T>(fn(as_float(a[i]), as_float(b[i])));
}

template <class T, class Fn>
void map(cudaStream_t stream, const void* a, const void* b, void* out, std::size_t n, Fn fn) {
  constexpr int kSize = 16 / sizeof(T);
  const T *p = static_cast<const T*>(a), *q = static_cast<const T*>(b);
  T* r = static_cast<T*>(out);
  const std::size_t packs = packed<kSize>(p) && packed<kSize>(q) && packed<kSize>(r) ? n / kSize : 0;
  if (n > 0)
    launch(map_kernel<T, Fn>, grid_for(packs + (n - packs * kSize), kThreads), kThreads, stream, fn, p, q, r,
           packs, n);
}

// y = value(x) where dy is null, else dx = dy slope(x).
template <class T, class Rule>
void activate(cudaStream_t stream, Rule rule, const void* x, const void* dy, void* out, std::size_t n) {
  if (dy)
    map<T>(stream, x, dy, out, n, ActivateGradient<Rule>{rule});
  else
    map<T>(stream, x, x, out, n, Activate<Rule>{rule});
}

template <class T>
void activate_by(cudaStream_t stream, const ActivationRule& rule, const void* x, const void* dy, void* out,
                 std::size_t n) {
  switch (rule.kind) {
    case ActivationKind::clamp:
      return activate<T>(stream, ClampRule{rule.low, rule.high}, x, dy, out, n);
    case ActivationKind::hardswish:
      return activate<T>(stream, HardswishRule{}, x, dy, out, n);
    case ActivationKind::sigmoid:
      return activate<T>(stream, SigmoidRule{}, x, dy, out, n);
    case ActivationKind::silu:
      return activate<T>(stream, SiluRule{}, x, dy, out, n);
  }
}

__device__ PhiloxStream at_step(PhiloxStream rng, const std::uint32_t* step) {
  if (step) rng.a = *step;
  return rng;
}

// The four elements of a thread share a block of numbers.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* in, T* out, std::size_t n, bool packed, float p, float keep, PhiloxStream stream,
                   const std::uint32_t* step) {
  using P = Pack<T, 4>;
  const std::size_t item = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item * 4 >= n) return;
  const PhiloxBlock block = at_step(stream, step).block(item);
  const auto dropped = [&](T x, int j) {
    return from_float<T>(as_float(x) * (uniform_of(block.words[j]) < p ? 0.0f : keep));
  };
  if (packed && item * 4 + 4 <= n) {
    P pack = reinterpret_cast<const P*>(in)[item];
    for (int j = 0; j < 4; ++j) pack.values[j] = dropped(pack.values[j], j);
    reinterpret_cast<P*>(out)[item] = pack;
    return;
  }
  for (int j = 0; j < 4; ++j)
    if (item * 4 + j < n) out[item * 4 + j] = dropped(in[item * 4 + j], j);
}

// In N, H, W, C order: an element of this order is another one in the order of the numbers.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_nhwc_kernel(const T* in, T* out, std::uint32_t n, DropoutShape shape, float p, float keep,
                        PhiloxStream stream, const std::uint32_t* step) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= n) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % shape.channels, pixel = i / shape.channels;
  const std::uint32_t number =
      (pixel / shape.pixels * shape.channels + c) * shape.pixels + pixel % shape.pixels;
  const PhiloxBlock block = at_step(stream, step).block(number / 4);
  std::uint32_t word = block.words[0];
  for (std::uint32_t j = 1; j < 4; ++j)
    if (number % 4 == j) word = block.words[j];
  out[i] = from_float<T>(as_float(in[i]) * (uniform_of(word) < p ? 0.0f : keep));
}

template <class T>
void dropout(cudaStream_t stream, const void* in, void* out, std::size_t n, DropoutShape shape, float p,
             float keep, const PhiloxStream& rng, const std::uint32_t* step) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(out);
  if (shape.channels > 1 && shape.pixels > 1)
    launch(dropout_nhwc_kernel<T>, grid_for(n, kThreads), kThreads, stream, from, to, n, shape, p, keep, rng,
           step);
  else
    launch(dropout_kernel<T>, grid_for(n, kThreads * 4), kThreads, stream, from, to, n,
           packed<4>(from) && packed<4>(to), p, keep, rng, step);
}

// One thread per channel of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_forward_kernel(const T* __restrict__ x, T* __restrict__ y, AveragePoolShape s, float scale) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= std::size_t{s.images} * s.channels) return;
  const std::size_t image = i / s.channels, channel = i % s.channels;
  const T* from = x + image * s.pixels * s.channels + channel;
  float sum = 0;
#pragma unroll 8
  for (std::uint32_t p = 0; p < s.pixels; ++p) sum += as_float(from[std::size_t{p} * s.channels]);
  y[i] = from_float<T>(sum * scale);
}

// A block goes through pixels of one image, its threads side by side over the channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_backward_kernel(const T* __restrict__ dy, T* __restrict__ dx, AveragePoolShape s, float scale) {
  const std::uint32_t per_image = s.pixels * s.channels;
  const T* from = dy + std::size_t{blockIdx.y} * s.channels;
  T* to = dx + std::size_t{blockIdx.y} * per_image;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < per_image; i += gridDim.x * kThreads)
    __stcs(to + i, from_float<T>(as_float(from[i % s.channels]) * scale));
}

template <class T>
void average_forward_of(cudaStream_t stream, const void* x, void* y, AveragePoolShape s) {
  launch(average_forward_kernel<T>, grid_for(std::size_t{s.images} * s.channels, kThreads), kThreads, stream,
         static_cast<const T*>(x), static_cast<T*>(y), s, 1.0f / static_cast<float>(s.pixels));
}
template <class T>
void average_backward_of(cudaStream_t stream, const void* dy, void* dx, AveragePoolShape s) {
  const unsigned blocks = grid_for(std::size_t{s.pixels} * s.channels, kThreads * 4).x;
  launch(average_backward_kernel<T>, dim3(blocks, s.images), kThreads, stream, static_cast<const T*>(dy),
         static_cast<T*>(dx), s, 1.0f / static_cast<float>(s.pixels));
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

void relu_forward(cudaStream_t stream, bool bf16, const void* x, void* y, std::size_t n) {
  (bf16 ? map<BF16, Relu> : map<float, Relu>)(stream, x, x, y, n, Relu{});
}

void relu_backward(cudaStream_t stream, bool bf16, const void* y, const void* dy, void* dx, std::size_t n) {
  (bf16 ? map<BF16, ReluGradient> : map<float, ReluGradient>)(stream, y, dy, dx, n, ReluGradient{});
}

void activation_forward(cudaStream_t stream, bool bf16, const ActivationRule& rule, const void* x, void* y,
                        std::size_t n) {
  (bf16 ? activate_by<BF16> : activate_by<float>)(stream, rule, x, nullptr, y, n);
}

void activation_backward(cudaStream_t stream, bool bf16, const ActivationRule& rule, const void* x,
                         const void* dy, void* dx, std::size_t n) {
  (bf16 ? activate_by<BF16> : activate_by<float>)(stream, rule, x, dy, dx, n);
}

void dropout_mask(cudaStream_t stream, bool bf16, const void* in, void* out, std::size_t n,
                  DropoutShape shape, float p, float keep, const PhiloxStream& rng,
                  const std::uint32_t* step) {
  if (n > 0) (bf16 ? dropout<BF16> : dropout<float>)(stream, in, out, n, shape, p, keep, rng, step);
}

void average_pool_forward(cudaStream_t stream, bool bf16, const void* x, void* y, AveragePoolShape shape) {
  (bf16 ? average_forward_of<__nv_bfloat16> : average_forward_of<float>)(stream, x, y, shape);
}
void average_pool_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, AveragePoolShape shape) {
  (bf16 ? average_backward_of<__nv_bfloat16> : average_backward_of<float>)(stream, dy, dx, shape);
}

}  // namespace topknot::cuda
