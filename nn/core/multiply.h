#pragma once
// x[i] *= factor for i < n, in the calling thread.

#include <cstddef>

namespace topknot {

void multiply(float* x, std::size_t n, float factor);
void multiply(double* x, std::size_t n, double factor);

}  // namespace topknot
