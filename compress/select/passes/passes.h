#pragma once
// The passes over the data that selectors are made of. Each is one read of the vector, cut over threads by
// contiguous ranges, so that a list by part is a list by index.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/memory/feedback_input.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/normal_quantile.h"

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

  std::size_t count() const;
  bool complete() const;
  bool finite() const;  // no NaN or Inf among what was found
};

// Adds to u and, in the same pass, lists the entries whose key exceeds `above`; up to
// `limit` a part. `above` at most kLargestFinite, so that NaN and Inf are always found.
void accumulate_and_collect(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                            std::size_t limit, Candidates& found);

// The same without adding.
void collect(std::span<const float> u, MagnitudeKey above, std::size_t limit, Candidates& found);

// Adds to u, with the moments of the sum, in double, shifted by moments_shift() so that a constant vector
// has variance 0 exactly. Sums are made by chunk over 16 lanes, and chunks are added in order.
struct Moments : NormalFit {
  bool finite = true;  // no NaN or Inf anywhere; the rest means nothing where this is false
  bool zero = true;    // nothing but zeros
};
Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input);
// And lists, as accumulate_and_collect() does.
Moments accumulate_with_moments(std::span<float> u, const FeedbackInput& input, MagnitudeKey above,
                                std::size_t limit, Candidates& found);

// One digit of a radix selection: counts[b] = how many keys have (key >> shift) == (prefix << width) + b.
std::vector<std::size_t> count_digits(std::span<const float> u, int shift, int width, MagnitudeKey prefix);

}  // namespace topknot
