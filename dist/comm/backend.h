#pragma once
// dist.backend: how the ranks of a run start and how they talk. A backend is one file that registers itself.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm/communicator.h"
#include "nn/base/registry.h"

namespace topknot {

// How a process joins its group.
struct GroupOptions {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // of the store, dist.master
  int port = 0;
  bool serve_store = false;  // rank 0 serves the store; false where the launcher does
  bool launcher_serves = false;
  std::string interface;     // dist.interface: network interface; "": the one that reaches the store
  std::string nccl;          // dist.nccl
  double timeout_s = 300;    // dist.timeout_s; 0: no limit
  std::string token = "";    // of the job: the store takes ranks with the same one only
  bool check_calls = false;  // compare operation, sequence number and size across ranks before every call
};

struct Backend {
  std::string needs;  // of the machine, in words, for messages
  // Joins the group as one of its processes; collective. Null: the ranks are threads of one process
  // (dist/comm/threads_communicator.h).
  std::unique_ptr<Communicator> (*join)(const GroupOptions& options) = nullptr;
  // Why this machine or this build cannot use the backend, "" where it can. Null: every machine can.
  std::string (*problem)() = nullptr;
};
Registry<Backend>& backends();

// dist.nccl, "ALGO=Ring IB_HCA=mlx5_0,mlx5_1", as variables of the environment: NCCL_ALGO and NCCL_IB_HCA. Throws UserError.
std::vector<std::pair<std::string, std::string>> nccl_variables(const std::string& settings);

int gpu_count();               // GPUs that this process sees; 0 in a build without CUDA
std::string gpu_bus(int gpu);  // its PCI address, such as "0000:3B:00.0"
// Host, PCI address and host name of a GPU, by lines: what NCCL takes for its identity.
std::string gpu_place(int gpu);

}  // namespace topknot
