#pragma once
// train --check-network: starts the ranks, checks every value that they exchange, and prints times and rates.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "train/config/config.h"

namespace topknot {

// A row of the table: `bytes` is the size of the whole result, of which all_gather sends one part per rank.
struct NetworkRow {
  std::string over;  // "host, gloo", "GPU, nccl"
  std::string operation;
  std::size_t bytes = 0;
  double seconds = 0;               // median
  double gigabytes_per_second = 0;  // that a rank sends: (P - 1) / P of the bytes, for all_reduce twice
};

// The collectives to check. Each takes this rank's numbers and leaves the result in place.
struct NetworkPath {
  std::string over;
  // Collective and timed; `mine` is at place rank() of `all`, whose blocks have one length.
  std::function<double(std::span<const std::byte> mine, std::span<std::byte> all)> gather;
  std::function<double(std::span<float>)> sum;
};

// Collective. Sends 1 kB, 1 MB and 16 MB several times and compares every value. Throws Error if one is
// wrong. `host`: for the ranks to begin together.
std::vector<NetworkRow> check_path(Communicator& host, const NetworkPath& path);

// The check over NCCL: cuda/network_check.cpp, or a stub that throws UserError. Collective; `gpu`: its index.
std::vector<NetworkRow> check_gpu_path(Communicator& host, int gpu, double timeout_s);
std::string gpu_name(int gpu);  // with its PCI address

// Starts the ranks of `loaded`, which has passed check_config(), has them check the network, and prints
// tables and, on CPUs, what compress.name=auto would try with the run's model and data. A rank that does not come within dist.timeout_s (where that is not given: 60 s) is an error.
// Returns the exit code.
int start_network_check(LoadedConfig loaded, char* const* argv);

}  // namespace topknot
