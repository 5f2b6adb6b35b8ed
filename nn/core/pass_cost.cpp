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

const PassCost* PassCost::allocated(std::int64_t bytes) {
  if (!counting) return nullptr;
  counting->bytes_ += bytes;
  counting->peak_ = std::max(counting->peak_, counting->bytes_);
  return counting;
}

void PassCost::released(std::int64_t bytes, const PassCost* by) {
  if (counting && counting == by) counting->bytes_ -= bytes;
}

}  // namespace topknot
