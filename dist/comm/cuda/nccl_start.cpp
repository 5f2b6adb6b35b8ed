#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "dist/comm/backend.h"
#include "dist/comm/cuda/nccl_start.h"
#include "nn/base/text.h"
#include "nn/core/cuda/check.h"

namespace topknot {
namespace {

// Two ranks with the same identity of the host and the same GPU cannot meet over NCCL.
std::string host_identity() {
  if (const char* given = std::getenv("NCCL_HOSTID"); given && *given) return given;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return host_name() + " " + boot;
}

}  // namespace

int gpu_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no GPU: no failure of a later call
  return 0;
}

std::string gpu_bus(int gpu) {
  char bus[32] = "";
  TOPKNOT_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, gpu));
  return bus;
}

std::string gpu_place(int gpu) {
  return host_identity() + "\n" + gpu_bus(gpu) + "\n" + host_name();
}

}  // namespace topknot

namespace topknot::cuda {
namespace {

void check_one_rank_per_gpu(Communicator& host, int device) {
  const std::string place = gpu_place(device);
  std::vector<std::vector<std::byte>> all;
  host.all_gather(std::as_bytes(std::span(place)), all);
  std::map<std::string, std::size_t> seen;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string text(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    const auto [first, is_new] = seen.emplace(text, r);
    if (is_new) continue;
    const auto gpu = text.find('\n') + 1, name = text.find('\n', gpu) + 1;
    host.barrier();  // the first to throw must not end the others' calls
    throw UserError(fmt::format(
        "dist.backend nccl: ranks {} and {} are on the same GPU ({} of {}), and NCCL takes one rank per "
        "GPU; start as many ranks per host as it has GPUs, or use dist.backend=threads for several ranks "
        "on one",
        first->second, r, text.substr(gpu, name - gpu - 1), text.substr(name)));
  }
}

}  // namespace

std::string nccl_version_text(int version) {
  const int major = version / (version < 10000 ? 1000 : 10000),
            rest = version - major * (version < 10000 ? 1000 : 10000);
  return fmt::format("{}.{}.{}", major, rest / 100, rest % 100);
}

std::string nccl_text(const std::string& call, ncclResult_t result, ncclComm_t communicator) {
  std::string text = call + ": " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(communicator);
  if (last && *last) text += std::string(" (") + last + ")";
  return text;
}

ncclUniqueId meet_for_nccl(Communicator& host, int device) {
  int version = 0;
  if (const ncclResult_t result = ncclGetVersion(&version); result != ncclSuccess)
    throw CudaError(fmt::format("rank {}: {}", host.rank(), nccl_text("ncclGetVersion", result)));
  check_same(host, "the version of NCCL (libnccl.so)", nccl_version_text(version));
  check_one_rank_per_gpu(host, device);
  ncclUniqueId id{};
  if (host.rank() == 0)
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
      throw CollectiveError("rank 0: " + nccl_text("ncclGetUniqueId", result) +
                            "; is there a network interface that NCCL may use (NCCL_SOCKET_IFNAME)?");
  host.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
  return id;
}

}  // namespace topknot::cuda
