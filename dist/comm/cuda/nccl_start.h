#pragma once
// What stands before NCCL's own start: checks that end with the same message on every rank, and the unique id.

#include <nccl.h>

#include <string>

#include "dist/comm/communicator.h"

namespace topknot::cuda {

// "2.28.9" of 22809.
std::string nccl_version_text(int version);

// "call: what NCCL says of the result (its name); the last error NCCL noted".
std::string nccl_text(const std::string& call, ncclResult_t result, ncclComm_t communicator = nullptr);

// Collective. Throws the same UserError on every rank: NCCL's versions differ, or ranks share a GPU and no
// NCCL_HOSTID tells them apart. Returns rank 0's unique id. `device`: this rank's GPU.
ncclUniqueId meet_for_nccl(Communicator& host, int device);

}  // namespace topknot::cuda
