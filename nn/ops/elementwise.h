#pragma once
// Ops that look at one element at a time.

#include "nn/core/autograd.h"
#include "nn/core/rng.h"

namespace topknot {

Variable relu(const Variable& x);  // max(0, x)
Variable add(const Variable& a,
             const Variable& b);  // a + b, of one shape; layouts may differ, the result has a's

// Each element is zeroed with probability p, the others are divided by 1 - p (inverted dropout); p in [0, 1).
// The i-th element in N, C, H, W order takes the i-th number of `rng`, whatever the layout and the thread
// count.
// `step`: see nn/ops/cuda_ops.h; for a GPU only.
Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step = nullptr);

}  // namespace topknot
