// Stands in for cuda/gpus.cpp in a build without CUDA.
#include "dist/comm/gpus.h"

namespace topknot {

int gpu_count() {
  return 0;
}

}  // namespace topknot
