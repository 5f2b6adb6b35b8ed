#pragma once
// What has been applied to a gradient before the optimizer gets it.

namespace topknot {

enum class GradientForm {
  plain,         // the averaged gradient
  has_momentum,  // momentum was applied before the average (DGC); the optimizer's own is for weight decay
  has_lr,        // the learning rate was applied before the average (LAGS-SGD)
};

}  // namespace topknot
