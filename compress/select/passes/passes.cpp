#include "compress/select/passes/passes.h"

#include <functional>
#include <limits>
#include <numeric>

#include "compress/parallel.h"
#include "compress/select/passes/pass_kernels.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

using pass::ChunkSums;
using pass::Sink;

// Makes room before the threads start: they must not throw.
void prepare(Candidates& found, std::size_t n, std::size_t parts, std::size_t limit) {
  found.parts.resize(parts);
  const std::size_t capacity = std::min(limit, n) + pass::kGroup;
  for (auto& part : found.parts) {
    if (part.capacity < capacity) {
      part.index.reset(new std::uint32_t[capacity]);
      part.value.reset(new float[capacity]);
      part.capacity = capacity;
    }
    part.count = 0;
    part.largest = 0;
    part.complete = true;
  }
}
Sink open_sink(Candidates::Part& part, std::size_t limit) {
  return {part.index.get(), part.value.get(), std::min(limit, part.capacity - pass::kGroup)};
}
void close_sink(const Sink& sink, Candidates::Part& part) {
  part.count = sink.complete ? sink.count : 0;
  part.largest = sink.largest;
  part.complete = sink.complete;
}

// Those of the list that `taken` says of their keys, `count` of them; it is asked once each, in order.
void take_if(const Candidates& found, std::size_t count, Selection& selected, auto&& taken) {
  selected.indices.resize(count + 1);  // one more: the loop writes before it knows
  selected.values.resize(count + 1);
  std::size_t n = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) {
      selected.indices[n] = part.index[i];
      selected.values[n] = part.value[i];
      n += taken(key_of(part.value[i]));
    }
  selected.indices.resize(count);
  selected.values.resize(count);
}

constexpr std::size_t kBins = 4096;
constexpr int kDigitBits = 11;
constexpr std::size_t kFewerThanDigits = 4096;  // entries that are sorted sooner than digits are counted

}  // namespace

TOPKNOT_MULTIVERSION void add_weighted(float* to, const float* x, std::size_t n, float weight) {
  for (std::size_t i = 0; i < n; ++i) to[i] += weight * x[i];
}
TOPKNOT_MULTIVERSION void subtract(float* to, const float* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] -= x[i];
}

void accumulate_and_collect(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                            std::size_t limit, Candidates& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink sink = open_sink(found.parts[p], limit);
    pass::accumulate_part(u.data(), input, begin, end, above, sink);
    close_sink(sink, found.parts[p]);
  });
}

bool accumulate(std::span<float> u, const FeedbackInput& input) {
  Candidates broken;
  accumulate_and_collect(u, input, kLargestFinite, 0, broken);
  return broken.finite();
}

void collect(std::span<const float> u, MagnitudeKey above, std::size_t limit, Candidates& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink sink = open_sink(found.parts[p], limit);
    pass::collect_part(u.data(), begin, end, above, sink);
    close_sink(sink, found.parts[p]);
  });
}

Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                                std::size_t limit, Candidates& found) {
  const std::size_t n = u.size(), parts = part_count(n);
  const auto made = [&](std::size_t i) { return input.made(u, i); };
  const double shift = moments_shift(made(0), made(n / 2), made(n - 1));
  std::vector<ChunkSums> sums((n + kChunk - 1) / kChunk);
  prepare(found, n, parts, limit);
  for_parts(n, parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink sink = open_sink(found.parts[p], limit);
    for (std::size_t i = begin; i < end; i += kChunk) {
      const std::size_t last = std::min(i + kChunk, end);
      sums[i / kChunk] =
          pass::moments_chunk(u.data(), pass::add_velocity(u, input, i, last), i, last, shift, above, sink);
    }
    close_sink(sink, found.parts[p]);
  });
  Moments result;
  result.finite = found.finite();
  double sum = 0, squares = 0;
  for (const ChunkSums& chunk : sums) {
    sum += chunk.sum;
    squares += chunk.squares;
    result.zero &= chunk.zero;
  }
  static_cast<NormalFit&>(result) = normal_fit(shift, sum, squares, n);
  return result;
}

Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input) {
  Candidates not_finite;
  return accumulate_with_moments(u, input, kLargestFinite, 0, not_finite);
}

std::vector<std::size_t> count_digits(std::span<const float> u, int shift, int width, MagnitudeKey prefix) {
  const std::size_t bins = std::size_t{1} << width;
  constexpr std::size_t copies =
      4;  // neighbours often fall into one bin; four tables keep the additions apart
  const std::size_t parts = part_count(u.size());
  std::vector<std::uint32_t> tables(parts * copies * bins);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    std::uint32_t* table = tables.data() + p * copies * bins;
    for (std::size_t i = begin; i < end; ++i) {
      const MagnitudeKey key = key_of(u[i]) >> shift;
      if ((key >> width) == prefix)
        ++table[(i % copies) * bins + static_cast<std::size_t>(key & static_cast<MagnitudeKey>(bins - 1))];
    }
  });
  std::vector<std::size_t> counts(bins);
  for (std::size_t i = 0; i < tables.size(); ++i) counts[i % bins] += tables[i];
  return counts;
}

bool begin_selection(bool finite, Selection& selected) {
  selected.indices.clear();
  selected.values.clear();
  selected.finite = finite;
  selected.threshold = 0;
  return finite;
}

float select_all(std::span<const float> u, Selection& selected) {
  selected.indices.resize(u.size());
  std::iota(selected.indices.begin(), selected.indices.end(), 0u);
  selected.values.assign(u.begin(), u.end());
  if (u.empty()) return 0;
  MagnitudeKey least = key_of(u[0]);
  for (const float x : u) least = std::min(least, key_of(x));
  return magnitude_of(least);
}

void take_found(const Candidates& found, Selection& selected) {
  selected.indices.resize(found.count());
  selected.values.resize(found.count());
  std::size_t n = 0;
  for (const auto& part : found.parts) {
    std::copy_n(part.index.get(), part.count, selected.indices.data() + n);
    std::copy_n(part.value.get(), part.count, selected.values.data() + n);
    n += part.count;
  }
}

std::size_t count_listed(const Candidates& found, MagnitudeKey above) {
  std::size_t count = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) count += key_of(part.value[i]) > above;
  return count;
}

void take_listed(const Candidates& found, MagnitudeKey above, std::size_t count, Selection& selected) {
  take_if(found, count, selected, [above](MagnitudeKey key) { return key > above; });
}

// Nearly all of a list lies close above its bound, so equal bins up from the bound leave a handful of keys to
// sort; what is more than twice the bound shares the last bin. A short list is sorted whole, sooner than bins are cleared.
MagnitudeKey kth_key(const Candidates& found, MagnitudeKey above, std::size_t k) {
  constexpr std::size_t kShort = 512;
  constexpr int shift = std::numeric_limits<float>::digits - 1 - 12;  // 4096 bins cover one octave
  const auto bin_of = [above](MagnitudeKey key) {
    return std::min<std::size_t>(static_cast<std::size_t>(key - above - 1) >> shift, kBins - 1);
  };
  const std::size_t listed = found.count();
  std::size_t bin = kBins - 1, higher = 0, in_bin = listed;
  if (listed > kShort) {
    std::vector<std::uint32_t> counts(kBins);
    for (const auto& part : found.parts)
      for (std::size_t i = 0; i < part.count; ++i) ++counts[bin_of(key_of(part.value[i]))];
    while (higher + counts[bin] < k) higher += counts[bin--];
    in_bin = counts[bin];
  }
  std::vector<MagnitudeKey> keys;
  keys.reserve(in_bin);
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i)
      if (const MagnitudeKey key = key_of(part.value[i]); in_bin == listed || bin_of(key) == bin)
        keys.push_back(key);
  const auto nth = keys.begin() + static_cast<std::ptrdiff_t>(k - higher - 1);
  std::nth_element(keys.begin(), nth, keys.end(), std::greater<>());
  return *nth;
}

MagnitudeKey select_from(const Candidates& found, MagnitudeKey above, std::size_t k, Selection& selected) {
  TOPKNOT_CHECK(k >= 1 && found.complete() && found.count() >= k,
                "a candidate list that cannot hold the k largest");
  const MagnitudeKey kth = kth_key(found, above, k);
  std::size_t ties = k - count_listed(found, kth);
  take_if(found, k, selected, [&](MagnitudeKey key) {
    const bool tie = key == kth && ties > 0;
    ties -= tie;
    return key > kth || tie;
  });
  return kth;
}

MagnitudeKey select_exact(std::span<const float> u, std::size_t k, Candidates& found, Selection& selected) {
  TOPKNOT_CHECK(k >= 1 && k <= u.size(), "k outside 1 to the vector's length");
  constexpr int bits = std::numeric_limits<MagnitudeKey>::digits;
  const std::size_t limit = 4 * k + 4096;
  if (u.size() <= kFewerThanDigits) {
    collect(u, -1, limit, found);
    return select_from(found, -1, k, selected);
  }
  MagnitudeKey prefix = 0;
  std::size_t higher = 0;  // entries above every key with this prefix
  for (int shift = bits - kDigitBits, width = kDigitBits;;) {
    const std::vector<std::size_t> counts = count_digits(u, shift, width, prefix);
    std::size_t bin = (std::size_t{1} << width) - 1;
    while (higher + counts[bin] < k) higher += counts[bin--];
    prefix = (prefix << width) | static_cast<MagnitudeKey>(bin);
    const MagnitudeKey edge = prefix << shift;
    if (higher + counts[bin] <= limit) {
      collect(u, static_cast<MagnitudeKey>(edge - 1), limit, found);
      return select_from(found, static_cast<MagnitudeKey>(edge - 1), k, selected);
    }
    if (shift == 0) break;
    width = std::min(shift, kDigitBits);
    shift -= width;
  }
  // Many entries tie at the k-th magnitude: those above it, and the first of the ties.
  const MagnitudeKey kth = prefix;
  collect(u, kth, limit, found);
  std::size_t ties = k - found.count(), at = 0;
  selected.indices.clear();
  selected.values.clear();
  const auto take_ties_below = [&](std::size_t end) {
    for (; at < end && ties > 0; ++at)
      if (key_of(u[at]) == kth) {
        selected.indices.push_back(static_cast<std::uint32_t>(at));
        selected.values.push_back(u[at]);
        --ties;
      }
  };
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) {
      take_ties_below(part.index[i]);
      selected.indices.push_back(part.index[i]);
      selected.values.push_back(part.value[i]);
    }
  take_ties_below(u.size());
  return kth;
}

void keep_largest(Selection& selected, std::size_t count) {
  if (selected.indices.size() <= count) return;
  Candidates scratch;
  Selection kept;
  select_exact(selected.values, count, scratch, kept);
  for (std::uint32_t& index : kept.indices) index = selected.indices[index];
  selected.indices = std::move(kept.indices);
  selected.values = std::move(kept.values);
}

}  // namespace topknot
