#pragma once
// Clipping by L2 norm: what is longer than `max_norm` is scaled to that length (Pascanu et al. 2013,
// section 3.2). Before compression over the whole model or tensor by tensor; after averaging over the model.
//
// Norms are summed in double in blocks of fixed size, so that they do not depend on the number of threads. A
// norm that is not finite clips nothing: the step's NaN or Inf must stay visible to the exchange, which skips
// the step. max_norm must be greater than 0; otherwise UserError.

#include <cstddef>
#include <span>

namespace topknot {

double sum_of_squares(std::span<const float> values);
double l2_norm(std::span<const float> values);

void check_clip_norm(double max_norm);  // throws UserError unless it is greater than 0

// max_norm / norm where the norm is finite and greater than max_norm, else 1.
double clip_factor(double norm, double max_norm);

void scale(std::span<float> values, double factor);

// After averaging the caller sums sum_of_squares() over the slices and hands clip_factor(norm, max_norm) to
// Optimizer::update() as gradient_scale, which saves a pass.

}  // namespace topknot
