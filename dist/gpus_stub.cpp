// Stands in for gpus_cuda.cpp in a build without CUDA.
#include "dist/gpus.h"

namespace topknot {

int gpu_count() {
  return 0;
}

}  // namespace topknot
