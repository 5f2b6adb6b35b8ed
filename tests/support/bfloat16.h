#pragma once
// Tests of bfloat16 on a CPU begin with this: without its products they are skipped, and ctest counts them as
// such.

#include "nn/core/tensor.h"
#include "tests/support/catch.h"

namespace topknot::testing {

inline bool multiplies_bfloat16() {
  if (cpu_has_bfloat16()) return true;
  WARN("skipped: this CPU has no products of bfloat16");
  return false;
}

}  // namespace topknot::testing
