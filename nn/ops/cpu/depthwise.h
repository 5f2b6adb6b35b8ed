#pragma once
// The depthwise convolution's gradient where oneDNN has no kernel of its own for it: kernels that are not 3 wide.

#include "nn/ops/kernels.h"

namespace topknot {

// dw[c,0,p,q] = sum_{n,i,j} dy[n,c,i,j] x[n,c,i*s+p-pad,j*s+q-pad], in the calling thread. `shape` is x's; x and dy are
// blocked, with channels padded to whole blocks.
void depthwise_weight_gradient(const ConvGeometry& g, const Shape& shape, const float* x, const float* dy,
                               float* dw);

}  // namespace topknot
