#include "nn/core/pass_cost.h"

#include <algorithm>
#include <atomic>

#include "nn/base/check.h"

namespace topknot {
namespace {
thread_local PassCost* counting = nullptr;

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}
}  // namespace

PassCost::PassCost() : number_(next_number()) {
  TOPKNOT_CHECK(!counting, "one PassCost at a time per thread");
  counting = this;
}

PassCost::~PassCost() {
  counting = nullptr;
}

void PassCost::add_flops(double flops) {
  if (counting) counting->flops_ += flops;
}

std::uint64_t PassCost::allocated(std::int64_t bytes) {
  if (!counting) return 0;
  counting->bytes_ += bytes;
  counting->peak_ = std::max(counting->peak_, counting->bytes_);
  return counting->number_;
}

void PassCost::released(std::int64_t bytes, std::uint64_t counter) {
  if (counting && counting->number_ == counter) counting->bytes_ -= bytes;
}

}  // namespace topknot
