// Stands in for device_cuda.cpp in a build without CUDA.
#include "nn/core/check.h"
#include "nn/core/device.h"

namespace topknot {

bool cuda_available() {
  return false;
}

DeviceBackend& cuda_backend() {
  throw UserError("this build has no CUDA backend; use train.device=cpu (or auto)");
}

}  // namespace topknot
