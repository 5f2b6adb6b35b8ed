#include "nn/ops/cpu/channels.h"

#include <cstring>
#include <utility>
#include <vector>

#include "nn/core/simd.h"

namespace topknot {
namespace {

// The type with as many elements of T side by side as V has floats.
template <class T, class V>
struct Row {
  typedef typename HalfLanes<V>::Half type;
};
template <class V>
struct Row<float, V> {
  typedef V type;
};

// Exchanges, between rows a and b that are S apart, the elements whose place differs from the row in bit S.
template <int S, class V, int... J>
TOPKNOT_INLINE void exchange(V& a, V& b, std::integer_sequence<int, J...>) {
  constexpr int n = sizeof...(J);
  const V low = __builtin_shufflevector(a, b, ((J & S) != 0 ? n + J - S : J)...);
  b = __builtin_shufflevector(a, b, ((J & S) != 0 ? n + J : J + S)...);
  a = low;
}
template <int S, class V, std::size_t N>
TOPKNOT_INLINE void exchange_all(V (&rows)[N]) {
  for (std::size_t i = 0; i < N; ++i)
    if ((i & S) == 0) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, N>());
}
template <class V, std::size_t N>
TOPKNOT_INLINE void transpose(V (&rows)[N]) {
  if constexpr (N > 8) exchange_all<8>(rows);
  exchange_all<4>(rows);
  exchange_all<2>(rows);
  exchange_all<1>(rows);
}

template <class T, class V>
TOPKNOT_INLINE void to_blocks_of(std::int64_t channels, std::int64_t pixels, const T* plain, T* blocks) {
  using R = typename Row<T, V>::type;
  constexpr std::int64_t N = sizeof(V) / sizeof(float);
  for (std::int64_t c = 0; c < channels; c += N, plain += N * pixels, blocks += N * pixels) {
    const std::int64_t here = std::min(N, channels - c);
    std::int64_t p = 0;
    for (; p + N <= pixels; p += N) {
      R rows[N]{};
      for (std::int64_t i = 0; i < N; ++i)
        if (i < here) std::memcpy(&rows[i], plain + i * pixels + p, sizeof(R));
      transpose(rows);
      std::memcpy(static_cast<void*>(blocks + p * N), rows, sizeof rows);
    }
    for (; p < pixels; ++p)
      for (std::int64_t i = 0; i < N; ++i) blocks[p * N + i] = i < here ? plain[i * pixels + p] : T();
  }
}
template <class T, class V>
TOPKNOT_INLINE void from_blocks_of(std::int64_t channels, std::int64_t pixels, const T* blocks, T* plain) {
  using R = typename Row<T, V>::type;
  constexpr std::int64_t N = sizeof(V) / sizeof(float);
  for (std::int64_t c = 0; c < channels; c += N, plain += N * pixels, blocks += N * pixels) {
    const std::int64_t here = std::min(N, channels - c);
    std::int64_t p = 0;
    for (; p + N <= pixels; p += N) {
      R rows[N];
      std::memcpy(rows, blocks + p * N, sizeof rows);
      transpose(rows);
      for (std::int64_t i = 0; i < N; ++i)
        if (i < here) std::memcpy(static_cast<void*>(plain + i * pixels + p), &rows[i], sizeof(R));
    }
    for (; p < pixels; ++p)
      for (std::int64_t i = 0; i < here; ++i) plain[i * pixels + p] = blocks[p * N + i];
  }
}

template <class T>
TOPKNOT_INLINE void any_block(bool to, std::int64_t channels, std::int64_t pixels, const void* from,
                              void* result) {
  const T* in = static_cast<const T*>(from);
  T* out = static_cast<T*>(result);
  if (channel_block() == 16)
    to ? to_blocks_of<T, Lanes>(channels, pixels, in, out)
       : from_blocks_of<T, Lanes>(channels, pixels, in, out);
  else
    to ? to_blocks_of<T, Lanes8>(channels, pixels, in, out)
       : from_blocks_of<T, Lanes8>(channels, pixels, in, out);
}
TOPKNOT_MULTIVERSION void any_type(DType type, bool to, std::int64_t channels, std::int64_t pixels,
                                   const void* from, void* result) {
  if (type == DType::bf16) return any_block<BFloat16>(to, channels, pixels, from, result);
  any_block<float>(to, channels, pixels, from, result);
}

}  // namespace

void to_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* plain, void* blocks) {
  any_type(type, true, channels, pixels, plain, blocks);
}
void from_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* blocks, void* plain) {
  any_type(type, false, channels, pixels, blocks, plain);
}

void add_channel_bias(Tensor& y, const float* bias, std::int64_t begin, std::int64_t end) {
  const ChannelGeometry g(y);
  by_type(y.dtype(), [&]<class T>(T) {
    T* p = y.as<T>() + begin * g.image_elements();
    for (std::int64_t n = begin; n < end; ++n)
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k, ++p) narrow(widened(*p) + bias[c + k], *p);
  });
}

Tensor sum_over_channels(const Tensor& x) {
  const ChannelGeometry g(x);
  std::vector<float> sums(static_cast<std::size_t>(g.images * g.channels));
  by_type(x.dtype(), [&]<class T>(T) {
    parallel_each(g.images, [&](std::int64_t n) {
      const T* p = x.as<T>() + n * g.image_elements();
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k)
            sums[static_cast<std::size_t>(n * g.channels + c + k)] += widened(*p++);
    });
  });
  Tensor total = Tensor::empty({g.channels});
  for (std::int64_t c = 0; c < g.channels; ++c) {
    double sum = 0;
    for (std::int64_t n = 0; n < g.images; ++n) sum += sums[static_cast<std::size_t>(n * g.channels + c)];
    total.data()[c] = static_cast<float>(sum);
  }
  return total;
}

}  // namespace topknot
