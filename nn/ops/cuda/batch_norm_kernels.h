#pragma once
// What batch norm computes on one image, for the ops that use it alone (batch_norm) or beside a convolution
// (conv_bn). Per-channel arrays have one value a channel.

#include "nn/ops/cpu/channels.h"

namespace topknot {

// sums[c] = sum (x - shift), sums[C + c] = sum (x - shift)^2; a shift near the mean keeps the variance from
// cancelling.
void bn_image_sums(const ChannelGeometry& g, const float* x, const float* shift, float* sums);

// y = scale x + shift (+ residual), then max(0, .) where relu. `residual` may be null.
void bn_image_apply(const ChannelGeometry& g, const float* x, const float* residual, float* y,
                    const float* scale, const float* shift, bool relu);

// masked = grad where y > 0, else 0; sums[c] = sum masked, sums[C + c] = sum masked * (x - mean). With y null
// nothing is masked and `masked` is not written; `masked` may be `grad`.
void bn_image_backward_sums(const ChannelGeometry& g, const float* grad, const float* y, const float* x,
                            const float* mean, float* masked, float* sums);

// dx = a grad + b x + c; dx may be grad.
void bn_image_backward_apply(const ChannelGeometry& g, const float* grad, const float* x, float* dx,
                             const float* a, const float* b, const float* c);

}  // namespace topknot
