#include "dist/comm/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/device.h"

namespace topknot {
namespace {

// NCCL carries what lies in GPU memory (dist/comm/cuda/nccl_communicator.cpp); the rest of a run's collectives are gloo's.
std::unique_ptr<Communicator> join_beside_nccl(const GroupOptions& options) {
  // No other thread runs yet. What the user has set in the environment stays.
  for (const auto& [name, value] : nccl_variables(options.nccl)) setenv(name.c_str(), value.c_str(), 0);
  // "=": this interface and not those whose names begin like it.
  if (!options.interface.empty()) setenv("NCCL_SOCKET_IFNAME", ("=" + options.interface).c_str(), 0);
  return make_gloo_communicator(options);
}

// Two ranks with the same identity of the host and the same GPU cannot meet over NCCL.
std::string host_identity() {
  if (const char* given = std::getenv("NCCL_HOSTID"); given && *given) return given;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return host_name() + " " + boot;
}

const bool backend_registered =
    (backends().add("nccl", "ranks are processes that talk from GPU to GPU by NCCL; needs one GPU per rank",
                    {.needs = "one GPU per rank", .join = join_beside_nccl, .problem = cuda_problem}),
     true);

}  // namespace

Registry<Backend>& backends() {
  static Registry<Backend> registry("backend (dist.backend)");
  return registry;
}

std::vector<std::pair<std::string, std::string>> nccl_variables(const std::string& settings) {
  const std::string prefix = "NCCL_";
  std::vector<std::pair<std::string, std::string>> variables;
  std::istringstream words(settings);
  for (std::string word; words >> word;) {
    const std::size_t at = word.find('=');
    const std::string name = word.substr(0, at);
    const bool good = at != std::string::npos && at > 0 && at + 1 < word.size() &&
                      std::all_of(name.begin(), name.end(), [](char c) {
                        return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
                      });
    if (!good)
      throw UserError(fmt::format(
          "dist.nccl: '{}' is no setting of NCCL; expected NAME=VALUE, such as IB_HCA=mlx5_0, several "
          "with spaces between them",
          word));
    variables.emplace_back(name.rfind(prefix, 0) == 0 ? name : prefix + name, word.substr(at + 1));
  }
  return variables;
}

std::string gpu_place(int gpu) {
  return host_identity() + "\n" + gpu_bus(gpu) + "\n" + host_name();
}

}  // namespace topknot
