#include "compress/select/passes/pass_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compress/memory/velocity.h"
#include "nn/core/simd.h"

namespace topknot::pass {
namespace {

// 64 bytes of T, and of its keys.
template <class T>
struct Vec : Vector64<T> {
  typedef Key<T> keys __attribute__((vector_size(64)));
};
typedef double Doubles __attribute__((vector_size(64)));
typedef std::int64_t Words __attribute__((vector_size(64)));
template <class T>
inline constexpr std::size_t kWidth = 64 / sizeof(T);

template <class V, class T>
TOPKNOT_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
TOPKNOT_INLINE typename Vec<T>::keys keys_of(typename Vec<T>::type v) {
  typename Vec<T>::keys k;
  std::memcpy(&k, &v, sizeof k);
  return k & std::numeric_limits<Key<T>>::max();
}
// Comparisons by subtraction: (bound - key) is negative exactly where key > bound, for keys are not negative
// and bounds at least -1. (The compiler takes a vector comparison with a mask result apart into scalars.)
template <class T>
TOPKNOT_INLINE bool any_negative(typename Vec<T>::keys v) {
  Words w;
  std::memcpy(&w, &v, sizeof w);
  w |= w << (64 - 8 * sizeof(T));  // the sign of each key, in the sign of a word
  return (((w[0] | w[1]) | (w[2] | w[3])) | ((w[4] | w[5]) | (w[6] | w[7]))) < 0;
}

// Appends x[0..n), which stands at position i. Without branches: candidates are too rare and irregular to
// predict.
template <class T>
TOPKNOT_INLINE void append(const T* x, std::size_t n, std::size_t i, Key<T> above, Sink<T>& sink) {
  std::size_t count = sink.count;
  Key<T> largest = sink.largest;
  for (std::size_t j = 0; j < n; ++j) {
    const Key<T> key = key_of(x[j]);
    sink.index[count] = static_cast<std::uint32_t>(i + j);
    sink.value[count] = x[j];
    count += key > above;
    largest = std::max(largest, key);
  }
  if (count > sink.limit) {
    sink.complete = false;
    count = 0;
  }
  sink.count = count;
  sink.largest = largest;
}

// Appends from a group that holds at least one candidate. It was just written, and its lines may still be on
// their way from memory: reading single elements would wait for them, whole vectors come from the store
// buffer.
template <class T>
TOPKNOT_INLINE void append_group(const T* u, std::size_t i, Key<T> above, Sink<T>& sink) {
  using V = typename Vec<T>::type;
  for (std::size_t at = i; at < i + kGroup; at += kWidth<T>) {
    const V v = load_as<V>(u + at);
    if (!any_negative<T>(above - keys_of<T>(v))) continue;
    alignas(64) T lanes[kWidth<T>];
    std::memcpy(lanes, &v, sizeof v);
    append(lanes, kWidth<T>, at, above, sink);
  }
}

// The vector a pass works on: written where it adds.
template <class T, bool kAdd>
using Data = std::conditional_t<kAdd, T, const T>*;

// How a pass comes by 64 bytes of u, or by one element: see VelocityStep for the third.
template <class T>
struct Reading {
  const T* u;
  TOPKNOT_INLINE typename Vec<T>::type vector(std::size_t i) const {
    return load_as<typename Vec<T>::type>(u + i);
  }
  void one(std::size_t) const {}
};
template <class T>
struct Adding {
  T* u;
  const T* addend;
  TOPKNOT_INLINE typename Vec<T>::type vector(std::size_t i) const {
    using V = typename Vec<T>::type;
    const V v = load_as<V>(u + i) + load_as<V>(addend + i);
    std::memcpy(u + i, &v, sizeof v);
    return v;
  }
  TOPKNOT_INLINE void one(std::size_t i) const { u[i] += addend[i]; }
};

template <class T, class Source>
TOPKNOT_INLINE void collect_body(const Source& source, std::size_t begin, std::size_t end, Key<T> above,
                                 Sink<T>& sink_out) {
  Sink<T> sink = sink_out;
  std::size_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    typename Vec<T>::keys hit{};
    for (std::size_t j = i; j < i + kGroup; j += kWidth<T>) hit |= above - keys_of<T>(source.vector(j));
    if (any_negative<T>(hit)) append_group<T>(source.u, i, above, sink);
  }
  for (std::size_t j = i; j < end; ++j) source.one(j);
  append<T>(source.u + i, end - i, i, above, sink);
  sink_out = sink;
}

template <class T>
TOPKNOT_INLINE void accumulate_body(T* u, const Addend<T>& addend, std::size_t begin, std::size_t end,
                                    Key<T> above, Sink<T>& sink) {
  if (addend.velocity)
    with_velocity_step(
        u, addend, begin, [&](const auto& step) __attribute__((always_inline)) {
          collect_body<T>(step, begin, end, above, sink);
        });
  else if (!addend.residual.empty())
    collect_body<T>(Adding<T>{u, addend.residual.data()}, begin, end, above, sink);
  else
    collect_body<T>(Reading<T>{u}, begin, end, above, sink);
}

// x - shift and its square over 16 lanes of double, for one chunk.
template <class T, bool kAdd>
TOPKNOT_INLINE ChunkSums moments_body(Data<T, kAdd> u, const T* addend, std::size_t begin, std::size_t end,
                                      double shift, Key<T> above, Sink<T>& sink_out) {
  typedef T Half __attribute__((vector_size(8 * sizeof(T))));
  using V = typename Vec<T>::type;
  using K = typename Vec<T>::keys;
  Sink<T> sink = sink_out;
  Doubles sum[2] = {}, squares[2] = {};
  K bits{};
  const auto sixteen = [&](std::size_t i) __attribute__((always_inline)) {
    K hit{};
    for (std::size_t j = i; j < i + 16; j += kWidth<T>) {
      V v = load_as<V>(u + j);
      if constexpr (kAdd) {
        v += load_as<V>(addend + j);
        std::memcpy(u + j, &v, sizeof v);
      }
      const K keys = keys_of<T>(v);
      hit |= above - keys;
      bits |= keys;
    }
    for (std::size_t half = 0; half < 2; ++half) {
      const Doubles x = __builtin_convertvector(load_as<Half>(u + i + 8 * half), Doubles) - shift;
      sum[half] += x;
      squares[half] += x * x;
    }
    return hit;
  };
  std::size_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    K hit{};
    for (std::size_t j = i; j < i + kGroup; j += 16) hit |= sixteen(j);
    if (any_negative<T>(hit)) append_group(u, i, above, sink);
  }
  const std::size_t listed = i;
  for (; i + 16 <= end; i += 16) sixteen(i);
  double tail_sum = 0, tail_squares = 0;
  Key<T> tail_bits = 0;
  for (; i < end; ++i) {
    if constexpr (kAdd) u[i] += addend[i];
    const double x = static_cast<double>(u[i]) - shift;
    tail_sum += x;
    tail_squares += x * x;
    tail_bits |= key_of(u[i]);
  }
  append(u + listed, end - listed, listed, above, sink);
  sink_out = sink;
  ChunkSums result;
  const Doubles s = sum[0] + sum[1], q = squares[0] + squares[1];
  for (int lane = 0; lane < 8; ++lane) {
    result.sum += s[lane];
    result.squares += q[lane];
  }
  result.sum += tail_sum;
  result.squares += tail_squares;
  result.zero = !any_negative<T>(-bits) && tail_bits == 0;
  return result;
}

}  // namespace

TOPKNOT_MULTIVERSION void accumulate_part(float* u, const Addend<float>& addend, std::size_t begin,
                                          std::size_t end, Key<float> above, Sink<float>& sink) {
  accumulate_body(u, addend, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void accumulate_part(double* u, const Addend<double>& addend, std::size_t begin,
                                          std::size_t end, Key<double> above, Sink<double>& sink) {
  accumulate_body(u, addend, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void collect_part(const float* u, std::size_t begin, std::size_t end, Key<float> above,
                                       Sink<float>& sink) {
  collect_body<float>(Reading<float>{u}, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void collect_part(const double* u, std::size_t begin, std::size_t end, Key<double> above,
                                       Sink<double>& sink) {
  collect_body<double>(Reading<double>{u}, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION ChunkSums moments_chunk(float* u, const float* addend, std::size_t begin,
                                             std::size_t end, double shift, Key<float> above,
                                             Sink<float>& sink) {
  return addend ? moments_body<float, true>(u, addend, begin, end, shift, above, sink)
                : moments_body<float, false>(u, nullptr, begin, end, shift, above, sink);
}
TOPKNOT_MULTIVERSION ChunkSums moments_chunk(double* u, const double* addend, std::size_t begin,
                                             std::size_t end, double shift, Key<double> above,
                                             Sink<double>& sink) {
  return addend ? moments_body<double, true>(u, addend, begin, end, shift, above, sink)
                : moments_body<double, false>(u, nullptr, begin, end, shift, above, sink);
}

}  // namespace topknot::pass
