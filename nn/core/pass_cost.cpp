#include "nn/core/pass_cost.h"

#include <algorithm>

#include "nn/core/base/check.h"

namespace topknot {
namespace {
thread_local PassCost* counting = nullptr;
}  // namespace

PassCost::PassCost() {
  TOPKNOT_CHECK(!counting, "one PassCost at a time per thread");
  counting = this;
}

PassCost::~PassCost() {
  counting = nullptr;
}

void PassCost::add_flops(double flops) {
  if (counting) counting->flops_ += flops;
}

void PassCost::add_bytes(std::int64_t bytes) {
  if (!counting) return;
  counting->bytes_ += bytes;
  counting->peak_ = std::max(counting->peak_, counting->bytes_);
}

}  // namespace topknot
