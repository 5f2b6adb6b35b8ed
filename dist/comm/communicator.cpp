#include "dist/comm/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "dist/comm/ordered_sum.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/device.h"

namespace topknot {
namespace {

// NCCL carries GPU memory (dist/comm/cuda/nccl_communicator.cpp); the run's other collectives are gloo's.
std::unique_ptr<Communicator> join_beside_nccl(const JoinOptions& options) {
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
    backends().add("nccl", "ranks are processes that talk from GPU to GPU by NCCL; needs one GPU per rank",
                   {.needs = "one GPU per rank", .join = join_beside_nccl, .problem = cuda_problem});

}  // namespace

std::string Communicator::place() const {
  std::string text;
  if (step_ >= 0) text += fmt::format(", step {}", step_);
  if (group_ >= 0) text += fmt::format(", group {}", group_);
  return text;
}

std::string Communicator::published(const std::string& reason) const {
  static const std::string kFirst = "\nfirst error: ";
  const std::size_t first = reason.rfind(kFirst);
  const std::string text = first == std::string::npos ? reason : reason.substr(first + kFirst.size());
  return text.rfind("rank ", 0) == 0 ? text : rank_name(rank()) + ": " + text;
}

void sum_doubles(Communicator& communicator, std::span<double> data) {
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(std::as_bytes(data), all);
  std::vector<const double*> sources;
  for (const auto& block : all) {
    TOPKNOT_CHECK(block.size() == data.size_bytes(), "the ranks sum different lengths");
    sources.push_back(reinterpret_cast<const double*>(block.data()));
  }
  ordered_sum(std::span<const double* const>(sources), data.data(), data.size());
}

std::vector<std::string> gather_texts(Communicator& communicator, const std::string& mine) {
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(std::as_bytes(std::span(mine)), all);
  std::vector<std::string> texts;
  for (const auto& block : all) texts.emplace_back(reinterpret_cast<const char*>(block.data()), block.size());
  return texts;
}

void meet_to_throw(Communicator& communicator) {
  try {
    communicator.barrier();
  } catch (const CollectiveError&) {
    // Another rank has passed the barrier and ended; all know what is wrong.
  }
}

void check_same(Communicator& communicator, const std::string& what, const std::string& value) {
  const std::vector<std::string> all = gather_texts(communicator, value);
  const auto text = [&](std::size_t r) {
    constexpr std::size_t longest = 80;
    return "'" + one_line(all[r], longest) + "'";
  };
  std::size_t odd = 1;
  while (odd < all.size() && all[odd] == all[0]) ++odd;
  if (odd == all.size()) return;
  meet_to_throw(communicator);
  throw UserError(fmt::format(
      "the ranks disagree about {}: {} has {}, {} has {}; start all ranks with the same program and "
      "configuration",
      what, communicator.rank_name(0), text(0), communicator.rank_name(static_cast<int>(odd)), text(odd)));
}

std::string unmatched_partners(std::span<const std::pair<int, int>> partners, const RunRanks& run_ranks) {
  const auto name = [&](int rank) { return rank < 0 ? std::string("no rank") : rank_name(run_ranks, rank); };
  for (std::size_t r = 0; r < partners.size(); ++r) {
    const auto [to, from] = partners[r];
    const int self = static_cast<int>(r);
    if (to >= 0 && partners[static_cast<std::size_t>(to)].second != self)
      return "the ranks do not make the same calls: in send_receive " + name(self) + " sends to " + name(to) +
             ", which expects " + name(partners[static_cast<std::size_t>(to)].second);
    if (from >= 0 && partners[static_cast<std::size_t>(from)].first != self)
      return "the ranks do not make the same calls: in send_receive " + name(self) + " expects " +
             name(from) + ", which sends to " + name(partners[static_cast<std::size_t>(from)].first);
  }
  return "";
}

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
