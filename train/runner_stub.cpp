// Replaces cuda/runner.cpp in a build without CUDA.
#include "nn/base/check.h"
#include "train/runner.h"

namespace topknot {

std::unique_ptr<Runner> make_cuda_runner(const RunInputs&, Communicator&) {
  throw UserError("train.device=cuda: " + cuda_problem());
}

}  // namespace topknot
