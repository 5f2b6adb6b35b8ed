// Stands in for cuda/device.cu in a build without CUDA.
#include "nn/base/check.h"
#include "nn/core/device.h"

namespace topknot {

bool built_with_cuda() {
  return false;
}

bool cuda_available() {
  return false;
}

std::string cuda_problem() {
  return "this build has no CUDA backend; install CUDA, cuDNN and NCCL and build again";
}

int gpu_count() {
  return 0;
}

std::string gpu_bus(int) {
  return "";
}

const DeviceBackend& cuda_backend() {
  throw UserError(cuda_problem());
}

}  // namespace topknot
