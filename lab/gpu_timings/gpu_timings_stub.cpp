// Stands in for cuda/gpu_timings.cpp in a build without CUDA.
#include "lab/gpu_timings/gpu_timings.h"
#include "nn/base/check.h"
#include "nn/core/device.h"

namespace topknot::gpu_timings {

void measure(const Options&, const std::function<void(const Timing&)>&) {
  throw UserError(cuda_problem());
}

std::vector<std::pair<std::string, std::string>> describe_gpu() {
  throw UserError(cuda_problem());
}

}  // namespace topknot::gpu_timings
