#pragma once
// The passes over the data that selectors are made of. Each is one read of the vector, cut over threads by
// contiguous ranges, so that a list by part is a list by index.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "compress/memory/addend.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/normal_quantile.h"

namespace topknot {

// Entries found by a pass, by part, ascending. Memory grows to what a pass may ask for and is reused.
template <class T>
struct Candidates {
  struct Part {
    std::unique_ptr<std::uint32_t[]> index;
    std::unique_ptr<T[]> value;
    std::size_t capacity = 0;
    std::size_t count = 0;
    Key<T> largest = 0;    // over all entries that were found, kept or not
    bool complete = true;  // false: more than the limit were found; the list is useless
  };
  std::vector<Part> parts;

  std::size_t count() const;
  bool complete() const;
  bool finite() const;  // no NaN or Inf among what was found
};

// Adds to u and, in the same pass, lists the entries whose key exceeds `above`; up to
// `limit` a part. `above` at most largest_finite_key, so that NaN and Inf are always found.
template <class T>
void accumulate_and_collect(std::span<T> u, const std::type_identity_t<Addend<T>>& addend, Key<T> above,
                            std::size_t limit, Candidates<T>& found);

// The same without adding.
template <class T>
void collect(std::span<const T> u, Key<T> above, std::size_t limit, Candidates<T>& found);

// Adds to u, with the moments of the sum, in double, shifted by moments_shift() so that a constant vector
// has variance 0 exactly. Sums are made by chunk over 16 lanes, and chunks are added in order.
struct Moments : NormalFit {
  bool finite = true;  // no NaN or Inf anywhere; the rest means nothing where this is false
  bool zero = true;    // nothing but zeros
};
template <class T>
Moments accumulate_with_moments(std::span<T> u, const std::type_identity_t<Addend<T>>& addend);
// And lists, as accumulate_and_collect() does.
template <class T>
Moments accumulate_with_moments(std::span<T> u, const std::type_identity_t<Addend<T>>& addend, Key<T> above,
                                std::size_t limit, Candidates<T>& found);

// One digit of a radix selection: counts[b] = how many keys have (key >> shift) == (prefix << width) + b.
template <class T>
std::vector<std::size_t> count_digits(std::span<const T> u, int shift, int width, Key<T> prefix);

}  // namespace topknot
