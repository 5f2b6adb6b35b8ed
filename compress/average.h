#pragma once
// The average of sparse contributions: sum_r(weight[r] * g_r) * (1 / P), added in rank order onto zeros, so
// that every rank gets the same bits whatever its threads. The dense compressor ends with the same
// multiplication, by 1 / P rounded to T.

#include <cstdint>
#include <span>

namespace topknot {

template <class T>
struct Contribution {
  std::span<const std::uint32_t> indices;  // strictly ascending
  std::span<const T> values;
  T weight = 1;
};

// Overwrites `average`, its whole length. `contributions` are by rank; P is their number.
template <class T>
void average_sparse(std::span<const Contribution<T>> contributions, std::span<T> average);

}  // namespace topknot
