#pragma once
// The primitives of selectors: passes over the data, functions that take entries from a pass's lists, and
// exact selection. A pass is one read of the vector, cut over threads by contiguous ranges, in order.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/memory/memory.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/quantiles.h"
#include "compress/select/selector.h"

namespace topknot {

// Entries found by a pass, by part, ascending. Memory grows to what a pass may ask for and is reused.
struct Candidates {
  struct Part {
    std::unique_ptr<std::uint32_t[]> index;
    std::unique_ptr<float[]> value;
    std::size_t capacity = 0;
    std::size_t count = 0;
    MagnitudeKey largest = 0;  // over all entries that were found, kept or not
    bool complete = true;      // false: more than the limit were found; the list is useless
  };
  std::vector<Part> parts;

  std::size_t count() const {
    std::size_t total = 0;
    for (const Part& part : parts) total += part.count;
    return total;
  }
  bool complete() const {
    return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.complete; });
  }
  // Whether there is no NaN or Inf among what was found.
  bool finite() const {
    return std::all_of(parts.begin(), parts.end(),
                       [](const Part& part) { return part.largest <= kLargestFinite; });
  }
};

// Adds to u and, in the same pass, lists the entries whose key exceeds `above`; up to `limit` a part. `above`
// at most kLargestFinite, so that NaN and Inf are always found.
void accumulate_and_collect(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                            std::size_t limit, Candidates& found);

// The same without adding.
void collect(std::span<const float> u, MagnitudeKey above, std::size_t limit, Candidates& found);

// Adds to u; returns whether the sum is finite.
bool accumulate(std::span<float> u, const FeedbackInput& input);

// to += weight x, and to -= x, of n elements, by the caller's thread.
void add_weighted(float* to, const float* x, std::size_t n, float weight);
void subtract(float* to, const float* x, std::size_t n);

// Adds to u, with the moments of the sum, in double, shifted by moments_shift() so that a constant vector
// has variance 0 exactly. Sums are made by chunk over 16 lanes, and chunks are added in order.
struct Moments : NormalFit {
  bool finite = true;  // no NaN or Inf anywhere; the rest means nothing if this is false
  bool zero = true;    // nothing but zeros
};
Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input);
// And lists, as accumulate_and_collect() does.
Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                                std::size_t limit, Candidates& found);

// One digit of a radix selection: counts[b] = how many keys have (key >> shift) == (prefix << width) + b.
std::vector<std::size_t> count_digits(std::span<const float> u, int shift, int width, MagnitudeKey prefix);

// The following write a selection, from a vector or from the list of a pass over it.

// Empties `selected` and notes whether the vector was finite; returns that.
bool begin_selection(bool finite, Selection& selected);
// Every entry of u; returns the least magnitude, 0 of none.
float select_all(std::span<const float> u, Selection& selected);
void take_found(const Candidates& found, Selection& selected);
// How many of the list exceed a bound.
std::size_t count_listed(const Candidates& found, MagnitudeKey above);
// Those of the list that exceed a bound, of which there are `count`, as count_listed() says.
void take_listed(const Candidates& found, MagnitudeKey above, std::size_t count, Selection& selected);

// The k-th largest key of the list, of at least k entries, which was collected with `above`.
MagnitudeKey kth_key(const Candidates& found, MagnitudeKey above, std::size_t k);

// Exact selection of the k largest magnitudes, ties to the lower index.
//
// From a list that holds at least k entries and is known to hold the k largest. `above` is the bound the list
// was collected with. Returns the k-th key; `selected` gets indices and values.
MagnitudeKey select_from(const Candidates& found, MagnitudeKey above, std::size_t k, Selection& selected);

// From the whole vector, 1 <= k <= n, all finite: radix selection by 11 bits, until few are left to list.
MagnitudeKey select_exact(std::span<const float> u, std::size_t k, Candidates& found, Selection& selected);

}  // namespace topknot
