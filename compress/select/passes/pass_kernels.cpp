#include "compress/select/passes/pass_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "nn/core/simd.h"

namespace topknot {

TOPKNOT_MULTIVERSION MagnitudeKey largest_key(const float* x, std::size_t n) {
  MagnitudeKey largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, key_of(x[i]));
  return largest;
}

namespace pass {
namespace {

// 64 bytes of values and of keys.
typedef float Floats __attribute__((vector_size(64)));
typedef MagnitudeKey Keys __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef std::int64_t Words __attribute__((vector_size(64)));
constexpr std::size_t kWidth = 64 / sizeof(float);

template <class V>
TOPKNOT_INLINE V load_as(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TOPKNOT_INLINE Keys keys_of(Floats v) {
  Keys k;
  std::memcpy(&k, &v, sizeof k);
  return k & std::numeric_limits<MagnitudeKey>::max();
}
// Comparisons by subtraction: (bound - key) is negative exactly where key > bound, for keys are not negative
// and bounds at least -1. (The compiler takes a vector comparison with a mask result apart into scalars.)
TOPKNOT_INLINE bool any_negative(Keys v) {
  Words w;
  std::memcpy(&w, &v, sizeof w);
  w |= w << 32;  // the sign of each key, in the sign of a word
  return (((w[0] | w[1]) | (w[2] | w[3])) | ((w[4] | w[5]) | (w[6] | w[7]))) < 0;
}

// Appends x[0..n), which stands at position i. Without branches: candidates are too irregular to predict.
TOPKNOT_INLINE void append(const float* x, std::size_t n, std::size_t i, MagnitudeKey above, Sink& sink) {
  std::size_t count = sink.count;
  MagnitudeKey largest = sink.largest;
  for (std::size_t j = 0; j < n; ++j) {
    const MagnitudeKey key = key_of(x[j]);
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

// Appends from a group that holds at least one candidate. It was just written: single elements would wait for
// their lines from memory, whole vectors come from the store buffer.
TOPKNOT_INLINE void append_group(const float* u, std::size_t i, MagnitudeKey above, Sink& sink) {
  for (std::size_t at = i; at < i + kGroup; at += kWidth) {
    const Floats v = load_as<Floats>(u + at);
    if (!any_negative(above - keys_of(v))) continue;
    alignas(64) float lanes[kWidth];
    std::memcpy(lanes, &v, sizeof v);
    append(lanes, kWidth, at, above, sink);
  }
}

// How a pass comes by 64 bytes of u, or by one element: see VelocityStep for the third.
struct Reading {
  const float* u;
  TOPKNOT_INLINE Floats vector(std::size_t i) const { return load_as<Floats>(u + i); }
  void one(std::size_t) const {}
};
struct Adding {
  float* u;
  const float* addend;
  TOPKNOT_INLINE Floats vector(std::size_t i) const {
    const Floats v = load_as<Floats>(u + i) + load_as<Floats>(addend + i);
    std::memcpy(u + i, &v, sizeof v);
    return v;
  }
  TOPKNOT_INLINE void one(std::size_t i) const { u[i] += addend[i]; }
};

// The pass that adds a velocity.
template <bool kNesterov, bool kAligned>
struct VelocityStep {
  float* u;
  const float *residual, *velocity;
  float* next;  // aligned to 64 bytes from the loop's first element on, if kAligned
  float momentum;

  // Makes 64 bytes of u from u[i] on, and returns them.
  TOPKNOT_INLINE Floats vector(std::size_t i) const {
    Floats x, added, old, moved;
    std::memcpy(&x, u + i, sizeof x);
    std::memcpy(&added, residual + i, sizeof added);
    std::memcpy(&old, velocity + i, sizeof old);
    x = added + momentum_corrected(x, old, moved, momentum, kNesterov);
    std::memcpy(u + i, &x, sizeof x);
    if constexpr (kAligned)
      stream(next + i, moved);  // not read in this step
    else
      std::memcpy(next + i, &moved, sizeof moved);
    return x;
  }
  TOPKNOT_INLINE void one(std::size_t i) const {
    u[i] = residual[i] + momentum_corrected(u[i], velocity[i], next[i], momentum, kNesterov);
  }
};

// Calls body with the VelocityStep for a loop from `begin` on.
TOPKNOT_INLINE void with_velocity_step(float* u, const FeedbackInput& a, std::size_t begin, auto&& body) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(a.next_velocity + begin) % 64 == 0;
  const float* residual = a.residual.data();
  if (a.nesterov && aligned)
    body(VelocityStep<true, true>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else if (a.nesterov)
    body(VelocityStep<true, false>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else if (aligned)
    body(VelocityStep<false, true>{u, residual, a.velocity, a.next_velocity, a.momentum});
  else
    body(VelocityStep<false, false>{u, residual, a.velocity, a.next_velocity, a.momentum});
  finish_streaming();
}

TOPKNOT_MULTIVERSION void velocity_part(float* u, const FeedbackInput& input, std::size_t begin,
                                        std::size_t end) {
  with_velocity_step(
      u, input, begin, [&](const auto& step) __attribute__((always_inline)) {
        std::size_t i = begin;
        for (; i + kWidth <= end; i += kWidth) step.vector(i);
        for (; i < end; ++i) step.one(i);
      });
}

TOPKNOT_INLINE void collect_body(const auto& source, std::size_t begin, std::size_t end, MagnitudeKey above,
                                 Sink& sink_out) {
  Sink sink = sink_out;
  std::size_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    Keys hit{};
    for (std::size_t j = i; j < i + kGroup; j += kWidth) hit |= above - keys_of(source.vector(j));
    if (any_negative(hit)) append_group(source.u, i, above, sink);
  }
  for (std::size_t j = i; j < end; ++j) source.one(j);
  append(source.u + i, end - i, i, above, sink);
  sink_out = sink;
}

// x - shift and its square over 16 lanes of double, for one chunk.
template <bool kAdd>
TOPKNOT_INLINE ChunkSums moments_body(float* u, const float* addend, std::size_t begin, std::size_t end,
                                      double shift, MagnitudeKey above, Sink& sink_out) {
  typedef float Half __attribute__((vector_size(8 * sizeof(float))));
  Sink sink = sink_out;
  Doubles sum[2] = {}, squares[2] = {};
  Keys bits{};
  const auto sixteen = [&](std::size_t i) __attribute__((always_inline)) {
    Keys hit{};
    for (std::size_t j = i; j < i + 16; j += kWidth) {
      Floats v = load_as<Floats>(u + j);
      if constexpr (kAdd) {
        v += load_as<Floats>(addend + j);
        std::memcpy(u + j, &v, sizeof v);
      }
      const Keys keys = keys_of(v);
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
    Keys hit{};
    for (std::size_t j = i; j < i + kGroup; j += 16) hit |= sixteen(j);
    if (any_negative(hit)) append_group(u, i, above, sink);
  }
  const std::size_t listed = i;
  for (; i + 16 <= end; i += 16) sixteen(i);
  double tail_sum = 0, tail_squares = 0;
  MagnitudeKey tail_bits = 0;
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
  result.zero = !any_negative(-bits) && tail_bits == 0;
  return result;
}

}  // namespace

const float* add_velocity(std::span<float> u, const FeedbackInput& input, std::size_t begin,
                          std::size_t end) {
  if (!input.velocity) return input.residual.empty() ? nullptr : input.residual.data();
  velocity_part(u.data(), input, begin, end);
  return nullptr;
}

TOPKNOT_MULTIVERSION void accumulate_part(float* u, const FeedbackInput& input, std::size_t begin,
                                          std::size_t end, MagnitudeKey above, Sink& sink) {
  if (input.velocity)
    with_velocity_step(
        u, input, begin, [&](const auto& step) __attribute__((always_inline)) {
          collect_body(step, begin, end, above, sink);
        });
  else if (!input.residual.empty())
    collect_body(Adding{u, input.residual.data()}, begin, end, above, sink);
  else
    collect_body(Reading{u}, begin, end, above, sink);
}

TOPKNOT_MULTIVERSION void collect_part(const float* u, std::size_t begin, std::size_t end, MagnitudeKey above,
                                       Sink& sink) {
  collect_body(Reading{u}, begin, end, above, sink);
}

TOPKNOT_MULTIVERSION ChunkSums moments_chunk(float* u, const float* addend, std::size_t begin,
                                             std::size_t end, double shift, MagnitudeKey above, Sink& sink) {
  return addend ? moments_body<true>(u, addend, begin, end, shift, above, sink)
                : moments_body<false>(u, nullptr, begin, end, shift, above, sink);
}

}  // namespace pass
}  // namespace topknot
