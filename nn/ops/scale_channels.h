#pragma once
// A factor for each channel of each image: the last step of squeeze and excitation (Hu, Shen, Sun, "Squeeze-and-excitation
// networks", CVPR 2018, equation 4).

#include "nn/ops/kernels.h"

namespace topknot {

// y[n,c,h,w] = x[n,c,h,w] s[n,c]. x: [N, C, H, W]; s: [N, C]. Layout as x's.
Variable scale_channels(const Variable& x, const Variable& s);

struct ScaleChannelsKernels {
  static constexpr const char* op = "scale_channels";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, const Tensor& s, Tensor& y);  // its own gradient: dx = forward(dy, s)
  void (*scale_gradient)(const Tensor& x, const Tensor& dy,
                         Tensor& ds);  // ds[n,c] = sum over h, w of dy[n,c,h,w] x[n,c,h,w]
};

}  // namespace topknot
