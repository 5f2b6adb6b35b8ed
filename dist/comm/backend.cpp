#include "dist/comm/backend.h"

#include <cstdlib>

#include "dist/comm/gloo_communicator.h"
#include "nn/core/device.h"

namespace topknot {

Registry<Backend>& backends() {
  static Registry<Backend> registry("backend (dist.backend)");
  return registry;
}

namespace {

// NCCL carries what lies in GPU memory (dist/comm/cuda/nccl_communicator.cpp); the rest of a run's collectives are gloo's.
std::unique_ptr<Communicator> join_beside_nccl(const GroupOptions& options) {
  // "=": this interface and not those whose names begin like it. No other thread runs yet.
  if (!options.interface.empty()) setenv("NCCL_SOCKET_IFNAME", ("=" + options.interface).c_str(), 0);
  return make_gloo_communicator(options);
}

const bool backend_registered =
    (backends().add("nccl", "ranks are processes that talk from GPU to GPU by NCCL; needs one GPU per rank",
                    {.needs = "one GPU per rank", .join = join_beside_nccl, .problem = cuda_problem}),
     true);

}  // namespace

}  // namespace topknot
