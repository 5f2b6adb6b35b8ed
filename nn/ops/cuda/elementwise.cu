#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// Elements side by side that are sent as one word.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

template <int kSize, class T>
bool packed(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * kSize) == 0;
}

// Items below `packs` are packs, the others the single elements after them.
template <class T, class Fn>
__global__ void __launch_bounds__(kThreads)
    map_kernel(Fn fn, const T* a, const T* b, T* out, std::size_t packs, std::size_t n) {
  await_previous();
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

// out = fn(a, b); out may be one of them.
template <class Fn>
void map(const Tensor& a, const Tensor& b, Tensor& out, Fn fn) {
  const std::size_t n = elements(out);
  if (n == 0) return;
  by_type(out, [&]<class T>(T) {
    constexpr int kSize = 16 / sizeof(T);
    const T *p = a.as<T>(), *q = b.as<T>();
    T* r = out.as<T>();
    const std::size_t packs = packed<kSize>(p) && packed<kSize>(q) && packed<kSize>(r) ? n / kSize : 0;
    launch_each(packs + (n - packs * kSize), map_kernel<T, Fn>, fn, p, q, r, packs, n);
  });
}

struct Relu {  // the comparison lets a NaN through
  __device__ float operator()(float x, float) const { return x <= 0 ? 0 : x; }
};
struct ReluGradient {
  __device__ float operator()(float y, float dy) const { return y <= 0 ? 0 : dy; }
};

void relu_forward(const Tensor& x, Tensor& y) {
  map(x, x, y, Relu{});
}
void relu_backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  map(y, dy, dx, ReluGradient{});
}

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

void activation_forward(const ActivationRule& rule, const Tensor& x, Tensor& y) {
  by_kind(rule, [&](auto of) { map(x, x, y, Activate<decltype(of)>{of}); });
}
void activation_backward(const ActivationRule& rule, const Tensor& x, const Tensor& dy, Tensor& dx) {
  by_kind(rule, [&](auto of) { map(x, dy, dx, ActivateGradient<decltype(of)>{of}); });
}

// Which of a stream's numbers an element takes: its place in N, C, H, W order. pixels == 1: as it lies in
// memory; else the tensor lies in N, H, W, C order.
struct DropoutShape {
  std::uint32_t channels = 1, pixels = 1;
};

// `step`, if not null, takes the place of rng.a.
__device__ PhiloxStream at_step(PhiloxStream rng, const std::uint32_t* step) {
  if (step) rng.a = *step;
  return rng;
}

// out = in * (number < p ? 0 : keep). The four elements of a thread share a block of numbers.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* in, T* out, std::size_t n, bool packed, float p, float keep, PhiloxStream stream,
                   const std::uint32_t* step) {
  await_previous();
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
  const std::size_t at = awaited_index();
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

// The mask is drawn anew from the same numbers in the backward pass.
struct DropoutMask {
  float p, keep;
  DropoutShape shape;
  PhiloxStream stream;
  const std::uint32_t* step;
};

OpState dropout_mask(const Tensor& x, float p, const CounterRng& rng, const std::uint32_t* step) {
  DropoutShape shape;
  if (x.layout() == Layout::nhwc) {
    // Numbers are counted in 32 bits in the kernels that go by N, H, W, C order.
    TOPKNOT_CHECK(x.numel() < std::int64_t{1} << 32,
                  "dropout: fewer than 2^32 elements, not " + x.shape().str());
    shape = {word(x.dim(1)), word(x.dim(2) * x.dim(3))};
  }
  return std::make_shared<DropoutMask>(DropoutMask{p, 1.0f / (1.0f - p), shape, rng.stream(), step});
}

Tensor times_mask(const Tensor& t, const OpState& state) {
  const auto& m = state_as<DropoutMask>(state);
  Tensor out = Tensor::empty_like(t);
  const std::size_t n = elements(t);
  if (n == 0) return out;
  by_type(t, [&]<class T>(T) {
    const T* from = t.as<T>();
    T* to = out.as<T>();
    if (m.shape.channels > 1 && m.shape.pixels > 1)
      launch_each(n, dropout_nhwc_kernel<T>, from, to, n, m.shape, m.p, m.keep, m.stream, m.step);
    else
      launch(dropout_kernel<T>, grid_for(n, kThreads * 4), kThreads, compute_stream(), from, to, n,
             packed<4>(from) && packed<4>(to), m.p, m.keep, m.stream, m.step);
  });
  return out;
}

const bool relu_registered =
    add_cuda_kernels<ReluKernels>({.forward = relu_forward, .backward = relu_backward});
const bool activation_registered =
    add_cuda_kernels<ActivationKernels>({.forward = activation_forward, .backward = activation_backward});
const bool dropout_registered =
    add_cuda_kernels<DropoutKernels>({.mask = dropout_mask, .times_mask = times_mask});

}  // namespace
}  // namespace topknot::cuda
