#include "dist/comm/gpus.h"

#include <cuda_runtime_api.h>

namespace topknot {

int gpu_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no GPU: no failure of a later call
  return 0;
}

}  // namespace topknot
