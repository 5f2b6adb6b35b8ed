// Stands in for cuda/engine.cpp in a build without CUDA.
#include "nn/base/check.h"
#include "train/engine.h"

namespace topknot {

std::unique_ptr<Engine> make_cuda_engine(const RunInputs&, Communicator&) {
  throw UserError("train.device=cuda: " + cuda_problem());
}

}  // namespace topknot
