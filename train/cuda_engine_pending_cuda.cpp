// Until the engine is there.
#include "nn/core/check.h"
#include "train/engine.h"

namespace topknot {

std::unique_ptr<Engine> make_cuda_engine(const RunInputs&, Communicator&) {
  throw UserError("train.device=cuda: this build has no trainer for GPUs yet; use cpu");
}

}  // namespace topknot
