// Replaces cuda/runner.cpp and cuda/network_check.cpp in a build without CUDA.
#include "nn/base/check.h"
#include "nn/core/device.h"
#include "train/network_check.h"
#include "train/runner.h"

namespace topknot {

std::unique_ptr<Runner> make_cuda_runner(const RunInputs&, Communicator&) {
  throw UserError("train.device=cuda: " + cuda_problem());
}

std::vector<NetworkRow> check_gpu_path(Communicator&, int, double) {
  throw UserError(cuda_problem());
}

std::string gpu_name(int) {
  throw UserError(cuda_problem());
}

}  // namespace topknot
