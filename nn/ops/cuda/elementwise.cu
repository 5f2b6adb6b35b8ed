#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/elementwise_kernels.h"

namespace topknot::cuda {
namespace {

using BF16 = __nv_bfloat16;

// Elements side by side that travel as one word.
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

// Items below `packs` are packs, the others the single elements after them.
template <class T, class Fn>
__global__ void __launch_bounds__(kThreads)
    map_kernel(const T* a, const T* b, T* out, std::size_t packs, std::size_t n) {
  constexpr int kSize = 16 / sizeof(T);
  using P = Pack<T, kSize>;
  const std::size_t item = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  const Fn fn;
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
void map(cudaStream_t stream, const void* a, const void* b, void* out, std::size_t n) {
  constexpr int kSize = 16 / sizeof(T);
  const T *p = static_cast<const T*>(a), *q = static_cast<const T*>(b);
  T* r = static_cast<T*>(out);
  const std::size_t packs = packed<kSize>(p) && packed<kSize>(q) && packed<kSize>(r) ? n / kSize : 0;
  if (n > 0)
    launch(map_kernel<T, Fn>, grid_for(packs + (n - packs * kSize), kThreads), kThreads, stream, p, q, r,
           packs, n);
}

__device__ PhiloxStream at_step(PhiloxStream rng, const std::uint32_t* step) {
  if (step) rng.a = *step;
  return rng;
}

// Four elements a thread share a block of numbers.
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

}  // namespace

void relu_forward(cudaStream_t stream, bool bf16, const void* x, void* y, std::size_t n) {
  (bf16 ? map<BF16, Relu> : map<float, Relu>)(stream, x, x, y, n);
}

void relu_backward(cudaStream_t stream, bool bf16, const void* y, const void* dy, void* dx, std::size_t n) {
  (bf16 ? map<BF16, ReluGradient> : map<float, ReluGradient>)(stream, y, dy, dx, n);
}

void dropout_mask(cudaStream_t stream, bool bf16, const void* in, void* out, std::size_t n,
                  DropoutShape shape, float p, float keep, const PhiloxStream& rng,
                  const std::uint32_t* step) {
  if (n > 0) (bf16 ? dropout<BF16> : dropout<float>)(stream, in, out, n, shape, p, keep, rng, step);
}

}  // namespace topknot::cuda
