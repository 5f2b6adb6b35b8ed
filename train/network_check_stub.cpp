// Replaces cuda/network_check.cpp in a build without CUDA.
#include "nn/base/check.h"
#include "nn/core/device.h"
#include "train/network_check.h"

namespace topknot {

std::vector<NetworkRow> check_gpu_path(Communicator&, int, double) {
  throw UserError(cuda_problem());
}

std::string gpu_name(int) {
  throw UserError(cuda_problem());
}

}  // namespace topknot
