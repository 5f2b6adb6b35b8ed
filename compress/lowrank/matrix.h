#pragma once
// Products of a matrix M [rows, cols] with thin factors, as power iteration needs them: P [rows, rank] by
// rows, and Q as its transpose [rank, cols], so that every inner loop runs along a row of M. One thread's
// part each: disjoint rows or columns, so that the same bits come out however the work is cut. Sums are in
// float: over lanes and in order. None of them throws.

#include <cstddef>

namespace topknot::lowrank {

inline constexpr std::size_t kStrip = 256;  // columns that transposed_product takes at a time

// P = M Q for rows [begin, end): every element of M is read ceil(rank / 4) times, once at rank 4.
void product(const float* m, std::size_t begin, std::size_t end, std::size_t cols, const float* q,
             std::size_t rank, float* p);

// Q = M^T P for columns [begin, end), at most kStrip; one read of M.
void transposed_product(const float* m, std::size_t rows, std::size_t cols, std::size_t begin,
                        std::size_t end, const float* p, std::size_t rank, float* q);

// For rows [begin, end): average = mean_p mean_q^T and, where own_p is not null, u -= own_p own_q^T.
// `average` may be u's memory where own_p is null.
struct Factors {
  const float *p, *q;
};
void rebuild(float* u, float* average, std::size_t begin, std::size_t end, std::size_t cols, std::size_t rank,
             Factors own, Factors mean);

}  // namespace topknot::lowrank
