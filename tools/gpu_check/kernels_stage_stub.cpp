// Stands in for cuda/kernels_stage.cpp in a build without CUDA, where no stage is run.
#include "nn/base/check.h"
#include "nn/core/device.h"
#include "tools/gpu_check/stages.h"

namespace topknot::gpu_check {

void measure_kernels(const Options&, const std::function<void(const Result&)>&) {
  throw UserError(cuda_problem());
}

void describe_gpu(Report&) {
  throw UserError(cuda_problem());
}

}  // namespace topknot::gpu_check
