#pragma once
// dist.backend: how the ranks of a run start and how they talk. A backend is one file that registers itself.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/comm/link.h"
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
  // Joins the group as one of its processes; collective. Null: the ranks are threads of one process.
  std::unique_ptr<Communicator> (*join)(const GroupOptions& options) = nullptr;
  // Why this machine or this build cannot use the backend, "" where it can. Null: every machine can.
  std::string (*problem)() = nullptr;
};
Registry<Backend>& backends();

// `threads` (dist/comm/threads_communicator.cpp): one communicator for each rank, to be used by one thread each. timeout_s
// <= 0: no deadline. `link`: collectives go over it.
std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks, double timeout_s,
                                                             const std::optional<EmulatedLink>& link = {});

// Runs body once per rank, each on a thread of its own, and waits for all of them. When a rank throws, the others' calls
// end with its error. After all have ended, the error of the rank that aborted the group first is thrown here.
void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body,
                      const std::optional<EmulatedLink>& link = {});

// `gloo` (dist/comm/gloo_communicator.cpp). Collective over all ranks. Throws UserError (port in use, unknown host) or
// CollectiveError (a rank did not come).
std::unique_ptr<Communicator> make_gloo_communicator(const GroupOptions& options);

// dist.nccl, "ALGO=Ring IB_HCA=mlx5_0,mlx5_1", as variables of the environment: NCCL_ALGO and NCCL_IB_HCA. Throws
// UserError.
std::vector<std::pair<std::string, std::string>> nccl_variables(const std::string& settings);
// Host, PCI address and host name of a GPU, by lines: what NCCL takes for its identity.
std::string gpu_place(int gpu);

}  // namespace topknot
