#pragma once
// An orthonormal basis of the columns of a factor: Householder's QR, in double (Golub and Van Loan, Matrix
// Computations, 5.2), with the signs of Gram-Schmidt (R has a positive diagonal). The columns come out
// orthonormal whatever goes in: a column that is zero, or an exact combination of those before it, is
// replaced by a random direction, so that a factor which lost a rank (a step of zero gradients) finds it
// again. Gram-Schmidt with an epsilon, as in the authors' code of PowerSGD, leaves it zero for ever.

#include <cstddef>
#include <span>
#include <vector>

#include "nn/core/rng.h"

namespace topknot::lowrank {

// Element (i, k) of the n x rank matrix is a[i * row_stride + k * column_stride]; n >= rank, all finite.
// `scratch` is reused memory. `fill` gives the random directions; the same on all ranks.
void orthonormalise(float* a, std::size_t n, std::size_t rank, std::size_t row_stride,
                    std::size_t column_stride, const CounterRng& fill, std::vector<double>& scratch);

}  // namespace topknot::lowrank
