#include "compress/select/passes/normal_quantile.h"

#include <string>

#include "compress/select/passes/normal_quantile_formula.h"
#include "nn/core/base/check.h"

namespace topknot {

double normal_quantile(double p) {
  TOPKNOT_CHECK(p > 0 && p < 1, "normal_quantile of " + std::to_string(p));
  return normal_quantile_formula(p);
}

}  // namespace topknot
