#pragma once
// Lists of entries in the hands of a sparse collective (dist/sparse/sparse_collective.h): sums of them, and their
// largest.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

// a's and b's entries, a's value + b's where positions meet. Not finite, and then empty, where either is not or
// a sum overflows.
void add_entries(const Entries<float>& a, const Entries<float>& b, Entries<float>& sum);

// Keeps the k entries of largest magnitude, of equals those of lower position; `dropped` gets the others'
// positions, ascending. A zero counts as any other value.
void keep_k_largest(Entries<float>& entries, std::size_t k, std::vector<std::uint32_t>& dropped);

// The k-th largest of the magnitudes (k >= 1), or 0 where there are fewer. Reorders them.
float kth_largest(std::vector<float>& magnitudes, std::size_t k);

// A copy of a rank's entries: not finite, and then empty, where a value is not finite (a weight may have taken
// it over the top).
void take_finite(const Entries<float>& mine, Entries<float>& copy);

}  // namespace topknot
