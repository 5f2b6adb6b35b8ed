#pragma once
// Gradients in the types of include/topknot.h, read into floats and written from them. A half is rounded to nearest, ties
// to even; what is too large becomes an infinity. By the threads of the caller.

#include <span>

#include "include/topknot.h"

namespace topknot {

// to[i] = from[i] * scale
void read_values(const void* from, topknot_type type, float scale, std::span<float> to);
// to[i] = from[i] * scale
void write_values(std::span<const float> from, float scale, topknot_type type, void* to);

}  // namespace topknot
