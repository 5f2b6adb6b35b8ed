#pragma once
// Products of a matrix M [rows, cols] with thin factors, as power iteration needs them: P [rows, rank] by
// rows, and Q as its transpose [rank, cols], so that every inner loop runs along a row of M. One thread's
// part each: disjoint rows or columns, so that the same bits come out however the work is cut. Sums are in
// float: over lanes and in order. None of them throws.

#include <cstddef>
#include <vector>

#include "nn/core/rng.h"

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

// An orthonormal basis of the columns of a factor: Householder's QR, in double (Golub and Van Loan, Matrix
// Computations, 5.2), with the signs of Gram-Schmidt (R has a positive diagonal). The columns come out
// orthonormal whatever goes in: a column that is zero, or an exact combination of those before it, is
// replaced by a random direction, so that a factor which lost a rank (a step of zero gradients) finds it
// again. Gram-Schmidt with an epsilon, as in the authors' code of PowerSGD, leaves it zero for ever.
//
// Element (i, k) of the n x rank matrix is a[i * row_stride + k * column_stride]; n >= rank, all finite.
// `scratch` is reused memory. `fill` gives the random directions; the same on all ranks.
void orthonormalise(float* a, std::size_t n, std::size_t rank, std::size_t row_stride,
                    std::size_t column_stride, const CounterRng& fill, std::vector<double>& scratch);

}  // namespace topknot::lowrank
