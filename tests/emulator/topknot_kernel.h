#pragma once
// What a .cu file is compiled against where it is to run on the CPU: the words of CUDA C++ that the kernels
// of this project use, over the machine of machine.h. The other header of this name (nn/core/nvcc) is for
// nvcc.
//
// Kernels keep to static shared memory, to what stands below, and to no library of device code.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "nn/core/cuda/check.h"
#include "tests/emulator/machine.h"

#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __noinline__
#define __noinline__
#undef __forceinline__
#define __forceinline__ inline
#undef __shared__
// Each thread of the operating system runs a block at a time. As with nvcc, nothing with a constructor.
#define __shared__ static constinit thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)

#define threadIdx (::topknot::emulator::place().thread)
#define blockIdx (::topknot::emulator::place().block)
#define blockDim (::topknot::emulator::place().block_size)
#define gridDim (::topknot::emulator::place().grid_size)

inline void __syncthreads(std::source_location here = std::source_location::current()) {
  ::topknot::emulator::block_barrier(0, here.line());
}
inline int __syncthreads_or(int predicate, std::source_location here = std::source_location::current()) {
  return ::topknot::emulator::block_barrier(predicate, here.line());
}
inline void __threadfence() {
  ::topknot::emulator::thread_fence();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::topknot::emulator::warp_exchange(mask, 0, true);
}

namespace topknot::emulator {

// The value that the lane `from` brings; a lane outside the warp gives one's own, as on the device.
template <class T>
T shuffle(unsigned mask, T mine, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  std::uint64_t word = 0;
  std::memcpy(&word, &mine, sizeof mine);
  const std::uint64_t* all = warp_exchange(mask, word);
  if (from < 0 || from >= 32) return mine;
  T theirs;
  std::memcpy(&theirs, &all[from], sizeof theirs);
  return theirs;
}

// Nobody comes between; what watches for races (races.h) is to see that it is atomic.
template <class T, class Fn>
T atomic(T* at, Fn&& fn) {
  give_way(16);
  const std::atomic_ref place(*at);
  const T old = place.load(std::memory_order_relaxed);
  place.store(fn(old), std::memory_order_relaxed);
  return old;
}

}  // namespace topknot::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return ::topknot::emulator::shuffle(mask, value, lane & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  return ::topknot::emulator::shuffle(mask, value, ::topknot::emulator::lane() - int(by));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by) {
  return ::topknot::emulator::shuffle(mask, value, ::topknot::emulator::lane() ^ by);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* all = ::topknot::emulator::warp_exchange(mask, predicate != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && all[lane]) bits |= 1u << lane;
  return bits;
}

template <class T, class U>
T atomicAdd(T* at, U value) {
  return ::topknot::emulator::atomic(at, [=](T old) { return T(old + T(value)); });
}
template <class T, class U>
T atomicMax(T* at, U value) {
  return ::topknot::emulator::atomic(at, [=](T old) { return std::max(old, T(value)); });
}
template <class T, class U>
T atomicOr(T* at, U value) {
  return ::topknot::emulator::atomic(at, [=](T old) { return T(old | T(value)); });
}

template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1;
}
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(std::uint64_t(x)) + 1;
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}

namespace topknot::cuda {

// As the header for nvcc has them.
inline void await_previous() {
  emulator::await_previous();
}
inline std::uint64_t global_nanoseconds() {
  return std::uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::steady_clock::now().time_since_epoch())
                           .count());
}
inline float power_of_two(float x) {
  return x < -126 ? 0 : std::exp2(x);
}
inline unsigned two_words(float low, float high) {
  return std::bit_cast<std::uint16_t>(__float2bfloat16_rn(low)) |
         unsigned(std::bit_cast<std::uint16_t>(__float2bfloat16_rn(high))) << 16;
}
namespace half_words {
inline float value(unsigned word, int half) {
  return std::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}
}  // namespace half_words
inline void multiply_add(const unsigned* a, const unsigned* b, float* c) {
  const int lane = emulator::lane(), g = lane / 4, p = lane % 4;
  std::uint64_t theirs[3][32];
  const std::uint64_t mine[] = {a[0] | std::uint64_t{a[1]} << 32, a[2] | std::uint64_t{a[3]} << 32,
                                b[0] | std::uint64_t{b[1]} << 32};
  for (int i = 0; i < 3; ++i) std::copy_n(emulator::warp_exchange(0xffffffffu, mine[i]), 32, theirs[i]);
  const auto word = [&](int pair, int lane_of, int upper) {
    return unsigned(theirs[pair][lane_of] >> (upper ? 32 : 0));
  };
  for (int r = 0; r < 2; ++r)
    for (int e = 0; e < 2; ++e)
      for (int k = 0; k < 16; ++k)
        c[2 * r + e] += half_words::value(word(k / 8, 4 * g + k % 8 / 2, r), k % 2) *
                        half_words::value(word(2, 4 * (2 * p + e) + k % 8 / 2, k / 8), k % 2);
}
template <bool kTransposed>
void load_matrices(const __nv_bfloat16* row, unsigned* m) {
  const int lane = emulator::lane(), g = lane / 4, p = lane % 4;
  const std::uint64_t* rows = emulator::warp_exchange(0xffffffffu, reinterpret_cast<std::uintptr_t>(row));
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) throw Error("ldmatrix of a row that is not aligned");
  for (int i = 0; i < 4; ++i) {
    unsigned word = 0;
    for (int e = 0; e < 2; ++e) {
      const int r = kTransposed ? 2 * p + e : g, column = kTransposed ? g : 2 * p + e;
      std::uint16_t bits = 0;
      std::memcpy(&bits, reinterpret_cast<const std::uint16_t*>(rows[8 * i + r]) + column, sizeof bits);
      word |= unsigned(bits) << 16 * e;
    }
    m[i] = word;
  }
}
inline void begin_copy(void* to_shared, const void* from, bool real) {
  emulator::begin_copy(to_shared, from, real);
}
inline void close_copies() {
  emulator::close_copies();
}
template <int kLeft>
void await_copies() {
  emulator::await_copies(kLeft);
}
bool early_launches();
template <class... P, class... A>
void launch(bool early, void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  std::tuple<std::decay_t<P>...> values(static_cast<P>(arguments)...);
  emulator::enqueue_kernel(stream, grid, block, reinterpret_cast<const void*>(kernel), early,
                           [kernel, values] { std::apply(kernel, values); });
  check_launch(reinterpret_cast<const void*>(kernel), grid.x, block.x);
}
template <class... P, class... A>
void launch_in_turn(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  launch(false, kernel, grid, block, stream, std::forward<A>(arguments)...);
}
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  launch(early_launches(), kernel, grid, block, stream, std::forward<A>(arguments)...);
}

}  // namespace topknot::cuda
