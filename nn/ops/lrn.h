#pragma once
// Local response normalisation across channels (Krizhevsky, Sutskever, Hinton, "ImageNet classification with deep
// convolutional neural networks", NIPS 2012, section 3.3):
//
//   y_c = x_c / d_c^beta,  d_c = k + alpha sum x_j^2 over the `size` channels j around c that there are

#include "nn/ops/kernels.h"

namespace topknot {

struct LrnOptions {
  std::int64_t size = 5;  // odd
  float alpha = 1e-4f, beta = 0.75f, k = 2;
  auto operator<=>(const LrnOptions&) const = default;
};

// x: [N, C, H, W]. Layout as x's.
Variable local_response_norm(const Variable& x, const LrnOptions& options = {});

struct LrnKernels {
  static constexpr const char* op = "local_response_norm";
  OpState (*forward)(const LrnOptions& options, const Tensor& x, Tensor& y);
  // dx_c = dy_c / d_c^beta - 2 alpha beta x_c sum over j of dy_j x_j / d_j^(beta + 1)
  void (*backward)(const LrnOptions& options, const OpState& state, const Tensor& x, const Tensor& dy,
                   Tensor& dx);
};

}  // namespace topknot
