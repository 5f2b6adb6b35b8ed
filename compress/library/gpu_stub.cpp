// Stands in for cuda/gpu.cu in a library without CUDA.
#include "compress/library/handle.h"

namespace topknot {

std::unique_ptr<Place> make_gpu(int, int) {
  refuse("this libtopknot has no CUDA; build it with TOPKNOT_CUDA=ON, or leave key 'device' at cpu");
}

}  // namespace topknot
