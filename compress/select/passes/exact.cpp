#include "compress/select/passes/passes.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "nn/base/check.h"

namespace topknot {
namespace {

constexpr std::size_t kBins = 4096;
constexpr int kDigitBits = 11;

}  // namespace

// Nearly all of a list lies close above its bound, so equal bins up from
// the bound leave a handful of keys to sort; what is more than twice the bound shares the last bin.
MagnitudeKey kth_key(const Candidates& found, MagnitudeKey above, std::size_t k) {
  constexpr int shift = std::numeric_limits<float>::digits - 1 - 12;  // 4096 bins cover one octave
  const auto bin_of = [above](MagnitudeKey key) {
    return std::min<std::size_t>(static_cast<std::size_t>(key - above - 1) >> shift, kBins - 1);
  };
  std::vector<std::uint32_t> counts(kBins);
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) ++counts[bin_of(key_of(part.value[i]))];
  std::size_t bin = kBins - 1, higher = 0;
  while (higher + counts[bin] < k) higher += counts[bin--];
  std::vector<MagnitudeKey> keys;
  keys.reserve(counts[bin]);
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i)
      if (const MagnitudeKey key = key_of(part.value[i]); bin_of(key) == bin) keys.push_back(key);
  const auto nth = keys.begin() + static_cast<std::ptrdiff_t>(k - higher - 1);
  std::nth_element(keys.begin(), nth, keys.end(), std::greater<>());
  return *nth;
}

MagnitudeKey select_from(const Candidates& found, MagnitudeKey above, std::size_t k, Selection& selected) {
  TOPKNOT_CHECK(k >= 1 && found.complete() && found.count() >= k,
                "a candidate list that cannot hold the k largest");
  const MagnitudeKey kth = kth_key(found, above, k);
  std::size_t greater = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) greater += key_of(part.value[i]) > kth;
  std::size_t ties = k - greater;
  // One entry more: the loop writes before it knows.
  selected.indices.resize(k + 1);
  selected.values.resize(k + 1);
  std::size_t n = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) {
      const MagnitudeKey key = key_of(part.value[i]);
      const bool tie = key == kth && ties > 0;
      ties -= tie;
      selected.indices[n] = part.index[i];
      selected.values[n] = part.value[i];
      n += key > kth || tie;
    }
  selected.indices.resize(k);
  selected.values.resize(k);
  return kth;
}

MagnitudeKey select_exact(std::span<const float> u, std::size_t k, Candidates& found, Selection& selected) {
  TOPKNOT_CHECK(k >= 1 && k <= u.size(), "k outside 1 to the vector's length");
  constexpr int bits = std::numeric_limits<MagnitudeKey>::digits;
  const std::size_t limit = 4 * k + 4096;
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
