#include "compress/select/passes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compress/parallel.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// 64 bytes of T, and of its keys.
template <class T>
struct Vec;
template <>
struct Vec<float> {
  typedef float type __attribute__((vector_size(64)));
  typedef std::int32_t keys __attribute__((vector_size(64)));
};
template <>
struct Vec<double> {
  typedef double type __attribute__((vector_size(64)));
  typedef std::int64_t keys __attribute__((vector_size(64)));
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

// Where a pass over one part writes. The memory has room for `limit` entries and one group more.
template <class T>
struct Sink {
  std::uint32_t* index;
  T* value;
  std::size_t limit;
  std::size_t count = 0;
  Key<T> largest = 0;
  bool complete = true;
};
inline constexpr std::size_t kGroup = 64;  // elements looked at between two tests for candidates

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

template <class T, bool kAdd>
TOPKNOT_INLINE void collect_body(Data<T, kAdd> u, const T* addend, std::size_t begin, std::size_t end,
                                 Key<T> above, Sink<T>& sink_out) {
  using V = typename Vec<T>::type;
  constexpr std::size_t vectors = kGroup / kWidth<T>;
  constexpr std::size_t ahead = 4096 / sizeof(T);
  Sink<T> sink = sink_out;
  std::size_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    typename Vec<T>::keys hit{};
    for (std::size_t j = 0; j < vectors; ++j) {
      const std::size_t at = i + j * kWidth<T>;
      __builtin_prefetch(u + at + ahead, kAdd ? 1 : 0);
      V v = load_as<V>(u + at);
      if constexpr (kAdd) {
        __builtin_prefetch(addend + at + ahead);
        v += load_as<V>(addend + at);
        std::memcpy(u + at, &v, sizeof v);
      }
      hit |= above - keys_of<T>(v);
    }
    if (any_negative<T>(hit)) append_group(u, i, above, sink);
  }
  if constexpr (kAdd)
    for (std::size_t j = i; j < end; ++j) u[j] += addend[j];
  append(u + i, end - i, i, above, sink);
  sink_out = sink;
}

struct ChunkSums {
  double sum = 0, squares = 0;
  bool finite = true, zero = true;
};

// x - shift and its square over 16 lanes of double, for one chunk.
template <class T, bool kAdd>
TOPKNOT_INLINE ChunkSums moments_body(Data<T, kAdd> u, const T* addend, std::size_t begin, std::size_t end,
                                      double shift) {
  Doubles sum[2] = {}, squares[2] = {};
  double tail_sum = 0, tail_squares = 0;
  typedef T Half __attribute__((vector_size(8 * sizeof(T))));
  using V = typename Vec<T>::type;
  using K = typename Vec<T>::keys;
  K above_finite{}, bits{};
  Key<T> tail_largest = 0;
  std::size_t i = begin;
  for (; i + 16 <= end; i += 16) {
    for (std::size_t j = 0; j < 16; j += kWidth<T>) {
      V v = load_as<V>(u + i + j);
      if constexpr (kAdd) {
        v += load_as<V>(addend + i + j);
        std::memcpy(u + i + j, &v, sizeof v);
      }
      const K keys = keys_of<T>(v);
      above_finite |= largest_finite_key<T>() - keys;
      bits |= keys;
    }
    for (int half = 0; half < 2; ++half) {
      const Doubles x = __builtin_convertvector(load_as<Half>(u + i + 8 * half), Doubles) - shift;
      sum[half] += x;
      squares[half] += x * x;
    }
  }
  for (; i < end; ++i) {
    if constexpr (kAdd) u[i] += addend[i];
    const double x = static_cast<double>(u[i]) - shift;
    tail_sum += x;
    tail_squares += x * x;
    tail_largest = std::max(tail_largest, key_of(u[i]));
  }
  ChunkSums result;
  const Doubles s = sum[0] + sum[1], q = squares[0] + squares[1];
  for (int lane = 0; lane < 8; ++lane) {
    result.sum += s[lane];
    result.squares += q[lane];
  }
  result.sum += tail_sum;
  result.squares += tail_squares;
  result.finite = !any_negative<T>(above_finite) && tail_largest <= largest_finite_key<T>();
  result.zero = !any_negative<T>(-bits) && tail_largest == 0;
  return result;
}

template <class T>
struct RungCounts {
  std::array<std::size_t, kRungs> counts{};
};

// One chunk: lane counters cannot overflow within it.
template <class T>
TOPKNOT_INLINE void count_body(const T* u, std::size_t begin, std::size_t end, const Key<T>* above,
                               Key<T> list_above, RungCounts<T>& total, Sink<T>& sink_out) {
  using V = typename Vec<T>::type;
  using K = typename Vec<T>::keys;
  Sink<T> sink = sink_out;
  K counters[kRungs] = {};
  std::size_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    K hit{};
    for (std::size_t j = 0; j < kGroup; j += kWidth<T>) {
      const K keys = keys_of<T>(load_as<V>(u + i + j));
      for (std::size_t r = 0; r < kRungs; ++r) counters[r] -= (above[r] - keys) >> (8 * sizeof(T) - 1);
      hit |= list_above - keys;
    }
    if (any_negative<T>(hit)) append_group(u, i, list_above, sink);
  }
  for (std::size_t r = 0; r < kRungs; ++r) {
    for (std::size_t lane = 0; lane < kWidth<T>; ++lane)
      total.counts[r] += static_cast<std::size_t>(counters[r][lane]);
    for (std::size_t j = i; j < end; ++j) total.counts[r] += key_of(u[j]) > above[r];
  }
  append(u + i, end - i, i, list_above, sink);
  sink_out = sink;
}

// Overloads, because templates cannot be compiled for several targets.
TOPKNOT_MULTIVERSION void collect_part(float* u, const float* addend, std::size_t begin, std::size_t end,
                                       Key<float> above, Sink<float>& sink) {
  collect_body<float, true>(u, addend, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void collect_part(double* u, const double* addend, std::size_t begin, std::size_t end,
                                       Key<double> above, Sink<double>& sink) {
  collect_body<double, true>(u, addend, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void collect_part(const float* u, std::size_t begin, std::size_t end, Key<float> above,
                                       Sink<float>& sink) {
  collect_body<float, false>(u, nullptr, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION void collect_part(const double* u, std::size_t begin, std::size_t end, Key<double> above,
                                       Sink<double>& sink) {
  collect_body<double, false>(u, nullptr, begin, end, above, sink);
}
TOPKNOT_MULTIVERSION ChunkSums moments_chunk(float* u, const float* addend, std::size_t begin,
                                             std::size_t end, double shift) {
  return addend ? moments_body<float, true>(u, addend, begin, end, shift)
                : moments_body<float, false>(u, nullptr, begin, end, shift);
}
TOPKNOT_MULTIVERSION ChunkSums moments_chunk(double* u, const double* addend, std::size_t begin,
                                             std::size_t end, double shift) {
  return addend ? moments_body<double, true>(u, addend, begin, end, shift)
                : moments_body<double, false>(u, nullptr, begin, end, shift);
}
TOPKNOT_MULTIVERSION void count_chunk(const float* u, std::size_t begin, std::size_t end,
                                      const Key<float>* above, Key<float> list_above,
                                      RungCounts<float>& total, Sink<float>& sink) {
  count_body<float>(u, begin, end, above, list_above, total, sink);
}
TOPKNOT_MULTIVERSION void count_chunk(const double* u, std::size_t begin, std::size_t end,
                                      const Key<double>* above, Key<double> list_above,
                                      RungCounts<double>& total, Sink<double>& sink) {
  count_body<double>(u, begin, end, above, list_above, total, sink);
}

// Makes room before the threads start: they must not throw.
template <class T>
void prepare(Candidates<T>& found, std::size_t n, std::size_t parts, std::size_t limit) {
  found.parts.resize(parts);
  const std::size_t capacity = std::min(limit, n) + kGroup;
  for (auto& part : found.parts) {
    if (part.capacity < capacity) {
      part.index.reset(new std::uint32_t[capacity]);
      part.value.reset(new T[capacity]);
      part.capacity = capacity;
    }
    part.count = 0;
    part.largest = 0;
    part.complete = true;
  }
}
template <class T>
Sink<T> open_sink(typename Candidates<T>::Part& part, std::size_t limit) {
  return {part.index.get(), part.value.get(), std::min(limit, part.capacity - kGroup)};
}
template <class T>
void close_sink(const Sink<T>& sink, typename Candidates<T>::Part& part) {
  part.count = sink.complete ? sink.count : 0;
  part.largest = sink.largest;
  part.complete = sink.complete;
}

}  // namespace

template <class T>
std::size_t Candidates<T>::count() const {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.count;
  return total;
}
template <class T>
bool Candidates<T>::complete() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.complete; });
}
template <class T>
bool Candidates<T>::finite() const {
  return std::all_of(parts.begin(), parts.end(),
                     [](const Part& part) { return part.largest <= largest_finite_key<T>(); });
}

template <class T>
void accumulate_and_collect(std::span<T> u, std::span<const T> addend, Key<T> above, std::size_t limit,
                            Candidates<T>& found) {
  if (addend.empty()) return collect(std::span<const T>(u), above, limit, found);
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    collect_part(u.data(), addend.data(), begin, end, above, sink);
    close_sink<T>(sink, found.parts[p]);
  });
}

template <class T>
void collect(std::span<const T> u, Key<T> above, std::size_t limit, Candidates<T>& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    collect_part(u.data(), begin, end, above, sink);
    close_sink<T>(sink, found.parts[p]);
  });
}

template <class T>
Moments accumulate_with_moments(std::span<T> u, std::span<const T> addend) {
  const std::size_t n = u.size();
  const T first = addend.empty() ? u[0] : u[0] + addend[0];
  const double shift = std::isfinite(first) ? static_cast<double>(first) : 0.0;
  std::vector<ChunkSums> sums((n + kChunk - 1) / kChunk);
  for_parts(n, part_count(n), [&](std::size_t, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kChunk)
      sums[i / kChunk] = moments_chunk(u.data(), addend.empty() ? nullptr : addend.data(), i,
                                       std::min(i + kChunk, end), shift);
  });
  Moments result;
  double sum = 0, squares = 0;
  for (const ChunkSums& chunk : sums) {
    sum += chunk.sum;
    squares += chunk.squares;
    result.finite &= chunk.finite;
    result.zero &= chunk.zero;
  }
  const double count = static_cast<double>(n);
  result.mean = shift + sum / count;
  result.deviation = n < 2 ? std::numeric_limits<double>::quiet_NaN()
                           : std::sqrt(std::max(0.0, squares - sum * (sum / count)) / (count - 1.0));
  return result;
}

template <class T>
std::array<std::size_t, kRungs> count_and_collect(std::span<const T> u,
                                                  const std::array<Key<T>, kRungs>& above, Key<T> list_above,
                                                  std::size_t limit, Candidates<T>& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  std::vector<RungCounts<T>> counts(parts);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    for (std::size_t i = begin; i < end; i += kChunk)
      count_chunk(u.data(), i, std::min(i + kChunk, end), above.data(), list_above, counts[p], sink);
    close_sink<T>(sink, found.parts[p]);
  });
  std::array<std::size_t, kRungs> total{};
  for (const RungCounts<T>& part : counts)
    for (std::size_t r = 0; r < kRungs; ++r) total[r] += part.counts[r];
  return total;
}

template <class T>
std::vector<std::size_t> count_digits(std::span<const T> u, int shift, int width, Key<T> prefix) {
  const std::size_t bins = std::size_t{1} << width;
  constexpr std::size_t copies =
      4;  // neighbours often fall into one bin; four tables keep the additions apart
  const std::size_t parts = part_count(u.size());
  std::vector<std::uint32_t> tables(parts * copies * bins);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    std::uint32_t* table = tables.data() + p * copies * bins;
    for (std::size_t i = begin; i < end; ++i) {
      const Key<T> key = key_of(u[i]) >> shift;
      if ((key >> width) == prefix)
        ++table[(i % copies) * bins + static_cast<std::size_t>(key & static_cast<Key<T>>(bins - 1))];
    }
  });
  std::vector<std::size_t> counts(bins);
  for (std::size_t i = 0; i < tables.size(); ++i) counts[i % bins] += tables[i];
  return counts;
}

template struct Candidates<float>;
template struct Candidates<double>;
template void accumulate_and_collect(std::span<float>, std::span<const float>, Key<float>, std::size_t,
                                     Candidates<float>&);
template void accumulate_and_collect(std::span<double>, std::span<const double>, Key<double>, std::size_t,
                                     Candidates<double>&);
template void collect(std::span<const float>, Key<float>, std::size_t, Candidates<float>&);
template void collect(std::span<const double>, Key<double>, std::size_t, Candidates<double>&);
template Moments accumulate_with_moments(std::span<float>, std::span<const float>);
template Moments accumulate_with_moments(std::span<double>, std::span<const double>);
template std::array<std::size_t, kRungs> count_and_collect(std::span<const float>,
                                                           const std::array<Key<float>, kRungs>&, Key<float>,
                                                           std::size_t, Candidates<float>&);
template std::array<std::size_t, kRungs> count_and_collect(std::span<const double>,
                                                           const std::array<Key<double>, kRungs>&,
                                                           Key<double>, std::size_t, Candidates<double>&);
template std::vector<std::size_t> count_digits(std::span<const float>, int, int, Key<float>);
template std::vector<std::size_t> count_digits(std::span<const double>, int, int, Key<double>);

}  // namespace topknot
