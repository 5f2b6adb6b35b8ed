#include "compress/select/passes/magnitude_passes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "compress/parallel.h"
#include "compress/select/passes/pass_kernels.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

typedef double Doubles __attribute__((vector_size(64)));
typedef std::int64_t Words __attribute__((vector_size(64)));
constexpr std::size_t kHalf = 8, kBlock = 2 * kHalf;  // elements of a vector of doubles; of one turn
// Keys of magnitudes as double (compress/select/passes/keys.h has those of floats).
constexpr std::int64_t kMagnitude = std::numeric_limits<std::int64_t>::max();
constexpr auto kFinite = std::bit_cast<std::int64_t>(std::numeric_limits<double>::max());

// Sums of |x| - shift and of its square, and the least and the largest key as double.
struct Sums {
  double sum = 0, squares = 0;
  std::int64_t count = 0, smallest = kMagnitude, largest = 0;

  void add(const Sums& other) {
    sum += other.sum;
    squares += other.squares;
    count += other.count;
    smallest = std::min(smallest, other.smallest);
    largest = std::max(largest, other.largest);
  }
};

template <class V, class From>
TOPKNOT_INLINE V bits_as(const From& from) {
  static_assert(sizeof(V) == sizeof(From));
  V v;
  std::memcpy(&v, &from, sizeof v);
  return v;
}
// Selection by sign: comparisons of whole vectors are taken apart into scalars by the compiler. Keys are not
// negative and bounds at least -1, so differences do not overflow.
TOPKNOT_INLINE Words negative(Words v) {
  return v >> 63;
}
TOPKNOT_INLINE Words least(Words a, Words b) {
  return a + ((b - a) & negative(b - a));
}
TOPKNOT_INLINE Words greatest(Words a, Words b) {
  return b - ((b - a) & negative(b - a));
}

// One chunk of u (+= addend, written, if kAdd): the entries whose key as double exceeds `above`; -1: all.
template <bool kAdd, bool kAll, class Float>
TOPKNOT_INLINE Sums sums_body(Float* u, const float* addend, std::size_t begin, std::size_t end, double shift,
                              std::int64_t above) {
  typedef float Half __attribute__((vector_size(kHalf * sizeof(float))));
  Doubles sum[2] = {}, squares[2] = {};
  Words count{}, smallest = Words{} + kMagnitude, largest{};
  std::size_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t at = i + half * kHalf;
      Half v;
      std::memcpy(&v, u + at, sizeof v);
      if constexpr (kAdd) {
        Half a;
        std::memcpy(&a, addend + at, sizeof a);
        v += a;
        std::memcpy(u + at, &v, sizeof v);
      }
      const Words key = bits_as<Words>(__builtin_convertvector(v, Doubles)) & kMagnitude;
      Doubles x = bits_as<Doubles>(key) - shift;
      if constexpr (kAll) {
        smallest = least(smallest, key);
        largest = greatest(largest, key);
      } else {
        const Words in = negative(above - key);
        x = bits_as<Doubles>(bits_as<Words>(x) & in);
        smallest = least(smallest, (key & in) | (~in & kMagnitude));
        largest = greatest(largest, key & in);
        count -= in;
      }
      sum[half] += x;
      squares[half] += x * x;
    }
  }
  Sums result;
  const Doubles s = sum[0] + sum[1], q = squares[0] + squares[1];
  for (std::size_t lane = 0; lane < kHalf; ++lane) {
    result.sum += s[lane];
    result.squares += q[lane];
    result.count += count[lane];
    result.smallest = std::min<std::int64_t>(result.smallest, smallest[lane]);
    result.largest = std::max<std::int64_t>(result.largest, largest[lane]);
  }
  if constexpr (kAll) result.count = static_cast<std::int64_t>(i - begin);
  for (; i < end; ++i) {
    if constexpr (kAdd) u[i] += addend[i];
    const double magnitude = std::abs(static_cast<double>(u[i]));
    const auto key = std::bit_cast<std::int64_t>(magnitude);
    if (key <= above) continue;
    const double x = magnitude - shift;
    result.add({x, x * x, 1, key, key});
  }
  return result;
}

// The sum of ln(|x| scale + epsilon) over one chunk. Each factor is at least 2^-52, so that 16 of them can be
// multiplied before a logarithm is taken.
TOPKNOT_MULTIVERSION double logs_chunk(const float* u, std::size_t begin, std::size_t end, double scale) {
  typedef float Half __attribute__((vector_size(kHalf * sizeof(float))));
  constexpr std::size_t factors = 16;
  constexpr double epsilon = std::numeric_limits<double>::epsilon();
  double sum = 0;
  std::size_t i = begin;
  for (; i + factors * kHalf <= end; i += factors * kHalf) {
    Doubles product = Doubles{} + 1.0;
    for (std::size_t j = 0; j < factors; ++j) {
      Half v;
      std::memcpy(&v, u + i + j * kHalf, sizeof v);
      const Words key = bits_as<Words>(__builtin_convertvector(v, Doubles)) & kMagnitude;
      product *= bits_as<Doubles>(key) * scale + epsilon;
    }
    for (std::size_t lane = 0; lane < kHalf; ++lane) sum += std::log(product[lane]);
  }
  for (; i < end; ++i) sum += std::log(std::abs(static_cast<double>(u[i])) * scale + epsilon);
  return sum;
}

TOPKNOT_MULTIVERSION std::size_t count_chunk(const float* u, std::size_t begin, std::size_t end,
                                             MagnitudeKey above) {
  MagnitudeKey count = 0;  // of one chunk
  for (std::size_t i = begin; i < end; ++i) count += key_of(u[i]) > above;
  return static_cast<std::size_t>(count);
}

TOPKNOT_MULTIVERSION Sums all_chunk(float* u, const float* addend, std::size_t begin, std::size_t end,
                                    double shift) {
  return addend ? sums_body<true, true>(u, addend, begin, end, shift, -1)
                : sums_body<false, true>(u, addend, begin, end, shift, -1);
}
TOPKNOT_MULTIVERSION Sums tail_chunk(const float* u, std::size_t begin, std::size_t end, double shift,
                                     std::int64_t above) {
  return sums_body<false, false>(u, nullptr, begin, end, shift, above);
}

// Returns body(begin, end) of each chunk of [0, n), in order.
template <class R, class Body>
std::vector<R> by_chunk(std::size_t n, Body&& body) {
  std::vector<R> results((n + kChunk - 1) / kChunk);
  for_parts(n, part_count(n), [&](std::size_t, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kChunk)
      results[i / kChunk] = body(i, std::min(i + kChunk, end));
  });
  return results;
}

MagnitudeMoments moments_of(const std::vector<Sums>& chunks, double shift) {
  Sums total;
  for (const Sums& chunk : chunks) total.add(chunk);
  MagnitudeMoments result;
  result.count = static_cast<std::size_t>(total.count);
  result.finite = total.largest <= kFinite;
  if (result.count == 0 || !result.finite) return result;
  const double n = static_cast<double>(total.count), offset = total.sum / n;
  result.mean = shift + offset;
  const double about_mean = std::max(0.0, total.squares - total.sum * offset);
  result.variance = total.count < 2 ? std::numeric_limits<double>::quiet_NaN() : about_mean / (n - 1.0);
  result.norm = std::sqrt(about_mean + n * result.mean * result.mean);
  result.smallest = std::bit_cast<double>(total.smallest);
  result.largest = std::bit_cast<double>(total.largest);
  return result;
}

}  // namespace

MagnitudeMoments accumulate_with_magnitudes(std::span<float> u, const FeedbackInput& input) {
  const std::size_t n = u.size();
  const auto made = [&](std::size_t i) { return std::abs(static_cast<double>(input.made(u, i))); };
  const double shift = moments_shift(made(0), made(n / 2), made(n - 1));
  return moments_of(by_chunk<Sums>(n,
                                   [&](std::size_t begin, std::size_t end) {
                                     return all_chunk(u.data(), pass::add_velocity(u, input, begin, end),
                                                      begin, end, shift);
                                   }),
                    shift);
}

MagnitudeMoments magnitudes_above(std::span<const float> u, double t) {
  TOPKNOT_CHECK(t >= 0, "a threshold below 0");
  const std::int64_t above = std::min(std::bit_cast<std::int64_t>(std::abs(t)), kFinite);
  return moments_of(
      by_chunk<Sums>(u.size(), [&](std::size_t begin,
                                   std::size_t end) { return tail_chunk(u.data(), begin, end, t, above); }),
      t);
}

std::size_t count_above(std::span<const float> u, MagnitudeKey above) {
  std::size_t total = 0;
  for (const std::size_t count : by_chunk<std::size_t>(u.size(), [&](std::size_t begin, std::size_t end) {
         return count_chunk(u.data(), begin, end, above);
       }))
    total += count;
  return total;
}

double mean_log_magnitude(std::span<const float> u, double norm) {
  double total = 0;
  for (const double sum : by_chunk<double>(u.size(), [&](std::size_t begin, std::size_t end) {
         return logs_chunk(u.data(), begin, end, 1.0 / norm);
       }))
    total += sum;
  return total / static_cast<double>(u.size());
}

std::size_t ThresholdSearch::count(MagnitudeKey above) {
  if (!listed(above)) {
    collect(u_, above, limit_, found_);
    have_list_ = found_.complete();
    bound_ = above;
    return have_list_ ? found_.count() : count_above(u_, above);
  }
  return count_listed(found_, above);
}

void ThresholdSearch::take(MagnitudeKey above, std::size_t count, Selection& selected) {
  if (!listed(above)) {
    collect(u_, above, count, found_);
    have_list_ = true;
    bound_ = above;
  }
  TOPKNOT_CHECK(count_listed(found_, above) == count,
                "another number of entries above the threshold than was counted");
  take_listed(found_, above, count, selected);
}

}  // namespace topknot
