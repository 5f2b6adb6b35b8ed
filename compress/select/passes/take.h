#pragma once
// What selectors write into their result, from a vector or from what a pass over it listed.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

// Empties `selected` and notes whether the vector was finite; returns that.
inline bool begin_selection(bool finite, Selected& selected) {
  selected.indices.clear();
  selected.values.clear();
  selected.finite = finite;
  selected.threshold = 0;
  return finite;
}

// Every entry of u; returns the least magnitude, 0 of none.
inline float select_all(std::span<const float> u, Selected& selected) {
  selected.indices.resize(u.size());
  std::iota(selected.indices.begin(), selected.indices.end(), 0u);
  selected.values.assign(u.begin(), u.end());
  if (u.empty()) return 0;
  MagnitudeKey least = key_of(u[0]);
  for (const float x : u) least = std::min(least, key_of(x));
  return magnitude_of(least);
}

// Everything that was found.
inline void take_found(const Candidates& found, Selected& selected) {
  selected.indices.resize(found.count());
  selected.values.resize(found.count());
  std::size_t n = 0;
  for (const auto& part : found.parts) {
    std::copy_n(part.index.get(), part.count, selected.indices.data() + n);
    std::copy_n(part.value.get(), part.count, selected.values.data() + n);
    n += part.count;
  }
}

// How many of the list exceed a bound.
inline std::size_t count_listed(const Candidates& found, MagnitudeKey above) {
  std::size_t count = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) count += key_of(part.value[i]) > above;
  return count;
}

// Those of the list that exceed a bound, of which there are `count`, as count_listed() says.
inline void take_listed(const Candidates& found, MagnitudeKey above, std::size_t count, Selected& selected) {
  selected.indices.resize(count + 1);  // one more: the loop writes before it knows
  selected.values.resize(count + 1);
  std::size_t n = 0;
  for (const auto& part : found.parts)
    for (std::size_t i = 0; i < part.count; ++i) {
      selected.indices[n] = part.index[i];
      selected.values[n] = part.value[i];
      n += key_of(part.value[i]) > above;
    }
  selected.indices.resize(count);
  selected.values.resize(count);
}

// The k-th largest key of the list, of at least k entries, which was collected with `above`.
MagnitudeKey kth_key(const Candidates& found, MagnitudeKey above, std::size_t k);

// Exact selection of the k largest magnitudes, ties to the lower index.
//
// From a list that holds at least k entries and is known to hold the k largest. `above` is the bound the list
// was collected with. Returns the k-th key; `selected` gets indices and values.
MagnitudeKey select_from(const Candidates& found, MagnitudeKey above, std::size_t k, Selected& selected);

// From the whole vector, 1 <= k <= n, all finite: radix selection, 11 bits a pass, until few enough entries
// are left to list. `found` is scratch.
MagnitudeKey select_exact(std::span<const float> u, std::size_t k, Candidates& found, Selected& selected);

}  // namespace topknot
