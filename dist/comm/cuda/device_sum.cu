#include "dist/comm/cuda/device_communicator.h"

#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kPerThread = 4;

struct Bits16 {
  unsigned short bits;
};

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(Bits16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
// Rounds as nn/core/bfloat16.h does, NaNs included.
__device__ inline unsigned rounded_bits(float x) {
  const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  return (magnitude > 0x7F800000u ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

__device__ inline void load(const float* from, float (&four)[4]) {
  load_quad<true>(from, four);
}
__device__ inline void load(const Bits16* from, float (&four)[4]) {
  const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
  four[0] = __uint_as_float(v.x << 16), four[1] = __uint_as_float(v.x & 0xFFFF0000u);
  four[2] = __uint_as_float(v.y << 16), four[3] = __uint_as_float(v.y & 0xFFFF0000u);
}
__device__ inline void store(const float (&four)[4], float* to) {
  store_quad<true>(to, four);
}
__device__ inline void store(const float (&four)[4], Bits16* to) {
  *reinterpret_cast<uint2*>(to) = make_uint2(rounded_bits(four[0]) | rounded_bits(four[1]) << 16,
                                             rounded_bits(four[2]) | rounded_bits(four[3]) << 16);
}
__device__ inline void store(float value, float* to) {
  *to = value;
}
__device__ inline void store(float value, Bits16* to) {
  to->bits = static_cast<unsigned short>(rounded_bits(value));
}

// A slice of every rank's array.
template <class T>
struct Everyone {
  RankPointers arrays;
  int ranks;
  std::size_t begin;
  __device__ const T* source(int r) const { return static_cast<const T*>(arrays.at[r]) + begin; }
  __device__ T* target(int r) const { return static_cast<T*>(arrays.at[r]) + begin; }
  __device__ int targets() const { return ranks; }
};

// Blocks one after the other, and the place of their sum.
template <class T>
struct Blocks {
  const T* blocks;
  std::size_t stride;
  int ranks;
  T* out;
  __device__ const T* source(int r) const { return blocks + r * stride; }
  __device__ T* target(int) const { return out; }
  __device__ int targets() const { return 1; }
};

// Each thread reads its elements of all sources before it writes them; no other thread touches them.
template <class T, class Memory>
__global__ void __launch_bounds__(kThreads) sum_kernel(Memory memory, std::size_t count, int aligned) {
  await_previous();
  const std::size_t i = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
  if (i >= count) return;
  if (aligned && i + kPerThread <= count) {
    float sum[4], more[4];
    load(memory.source(0) + i, sum);
    for (int r = 1; r < memory.ranks; ++r) {
      load(memory.source(r) + i, more);
      for (int j = 0; j < 4; ++j) sum[j] += more[j];
    }
    for (int t = 0; t < memory.targets(); ++t) store(sum, memory.target(t) + i);
    return;
  }
  for (std::size_t j = i; j < count && j < i + kPerThread; ++j) {
    float sum = to_float(memory.source(0)[j]);
    for (int r = 1; r < memory.ranks; ++r) sum += to_float(memory.source(r)[j]);
    for (int t = 0; t < memory.targets(); ++t) store(sum, memory.target(t) + j);
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(RankPointers blocks, Word* all, std::size_t words) {
  await_previous();
  const Word* from = static_cast<const Word*>(blocks.at[blockIdx.y]);
  Word* to = all + blockIdx.y * words;
  if (from == to) return;
  std::size_t i = std::size_t{blockIdx.x} * kThreads * kPerThread + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, i += kThreads)
    if (i < words) to[i] = from[i];
}

bool aligned_to(const void* at, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

template <class T, class Memory>
void sum(cudaStream_t stream, const Memory& memory, std::size_t count, bool aligned) {
  if (count > 0)
    launch(sum_kernel<T, Memory>, grid_for(count, kThreads * kPerThread), kThreads, stream, memory, count,
           aligned ? 1 : 0);
}

template <class T>
void sum_to_all(cudaStream_t stream, const RankPointers& arrays, int ranks, std::size_t begin,
                std::size_t count) {
  bool aligned = begin % 4 == 0;
  for (int r = 0; r < ranks; ++r) aligned = aligned && aligned_to(arrays.at[r], 4 * sizeof(T));
  sum<T>(stream, Everyone<T>{arrays, ranks, begin}, count, aligned);
}

template <class T>
void sum_of_blocks(cudaStream_t stream, const void* blocks, std::size_t stride, int ranks, void* out,
                   std::size_t count) {
  const bool aligned = stride % 4 == 0 && aligned_to(blocks, 4 * sizeof(T)) && aligned_to(out, 4 * sizeof(T));
  sum<T>(stream, Blocks<T>{static_cast<const T*>(blocks), stride, ranks, static_cast<T*>(out)}, count,
         aligned);
}

template <class Word>
void gather(cudaStream_t stream, const RankPointers& blocks, int ranks, std::size_t bytes, std::byte* all) {
  const std::size_t words = bytes / sizeof(Word);
  const dim3 grid(grid_for(words, kThreads * kPerThread).x, static_cast<unsigned>(ranks));
  launch(gather_kernel<Word>, grid, kThreads, stream, blocks, reinterpret_cast<Word*>(all), words);
}

}  // namespace

void ordered_sum_to_all(cudaStream_t stream, DType type, const RankPointers& arrays, int ranks,
                        std::size_t begin, std::size_t count) {
  if (type == DType::f32)
    sum_to_all<float>(stream, arrays, ranks, begin, count);
  else
    sum_to_all<Bits16>(stream, arrays, ranks, begin, count);
}

void ordered_sum_of_blocks(cudaStream_t stream, DType type, const void* blocks, std::size_t stride, int ranks,
                           void* out, std::size_t count) {
  if (type == DType::f32)
    sum_of_blocks<float>(stream, blocks, stride, ranks, out, count);
  else
    sum_of_blocks<Bits16>(stream, blocks, stride, ranks, out, count);
}

void gather_blocks(cudaStream_t stream, const RankPointers& blocks, int ranks, std::size_t bytes,
                   std::byte* all) {
  if (bytes == 0 || ranks == 0) return;
  const auto fits = [&](std::size_t word) {
    bool every = bytes % word == 0 && aligned_to(all, word);
    for (int r = 0; r < ranks; ++r) every = every && aligned_to(blocks.at[r], word);
    return every;
  };
  if (fits(sizeof(uint4)))
    gather<uint4>(stream, blocks, ranks, bytes, all);
  else if (fits(sizeof(unsigned)))
    gather<unsigned>(stream, blocks, ranks, bytes, all);
  else
    gather<unsigned char>(stream, blocks, ranks, bytes, all);
}

}  // namespace topknot::cuda
