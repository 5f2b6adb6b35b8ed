#pragma once
// Tools of CPU kernels: an activation seen as images of channels, and the split of a batch over threads.

#include <algorithm>
#include <cstdint>
#include <exception>

#include "nn/base/check.h"
#include "nn/core/bfloat16.h"
#include "nn/core/tensor.h"
#include "nn/core/threads.h"

namespace topknot {

inline constexpr int kWidestBlock = 16;  // of channel_block()

// The `block` channels of a pixel lie side by side (block 1 for plain tensors).
struct ChannelGeometry {
  std::int64_t images, channels, pixels;  // pixels = H * W
  int block;

  explicit ChannelGeometry(const Tensor& x)
      : images(x.dim(0)),
        channels(x.dim(1)),
        pixels(x.dim(2) * x.dim(3)),
        block(x.layout() == Layout::blocked ? channel_block() : 1) {}
  std::int64_t image_elements() const { return channels * pixels; }
  // Its elements, stored as T; null of an undefined tensor.
  template <class T>
  const T* image(const Tensor& t, std::int64_t n) const {
    return t.defined() ? t.as<T>() + n * image_elements() : nullptr;
  }
  template <class T>
  T* image(Tensor& t, std::int64_t n) const {
    return t.as<T>() + n * image_elements();
  }
};

// One image's activations between the plain layout, [channels][pixels], and blocks of channel_block()
// channels, [block][pixels][channel of the block], the last one filled up with zeros. In the calling thread.
void to_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* plain, void* blocks);
void from_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* blocks, void* plain);

// y[n,c,...] += bias[c] for images [begin, end).
void add_channel_bias(Tensor& y, const float* bias, std::int64_t begin, std::int64_t end);
// s[c] = sum over n, i, j of x[n,c,i,j], in f32; added in image order, the same for any thread count.
Tensor sum_over_channels(const Tensor& x);

// Calls fn(T()) with the type in which a tensor's elements are stored.
template <class Fn>
decltype(auto) by_type(DType type, Fn&& fn) {
  return type == DType::bf16 ? fn(BFloat16()) : fn(float());
}
// One element as a float, and back.
inline float widened(float x) {
  return x;
}
inline float widened(BFloat16 x) {
  return to_float(x);
}
inline void narrow(float x, float& to) {
  to = x;
}
inline void narrow(float x, BFloat16& to) {
  to = to_bfloat16(x);
}

// Splits a batch over the compute threads of the calling rank, the same way in every op, so that an image
// stays in the cache of the core that made it. Runs fn(range, begin, end) on disjoint ranges that cover [0,
// n), one for each thread of team_size(), whatever team OpenMP gives. Rethrows.
void parallel_ranges(std::int64_t n, auto&& fn) {
  const int threads = static_cast<int>(std::min<std::int64_t>(team_size(), std::max<std::int64_t>(n, 1)));
  if (threads <= 1) return fn(0, std::int64_t{0}, n);
  std::exception_ptr error;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int r = 0; r < threads; ++r) {
    try {
      fn(r, n * r / threads, n * (r + 1) / threads);
    } catch (...) {
#pragma omp critical(topknot_parallel_ranges)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// fn(i) for each i below n, in such ranges.
void parallel_each(std::int64_t n, const auto& fn) {
  parallel_ranges(n, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) fn(i);
  });
}

}  // namespace topknot
