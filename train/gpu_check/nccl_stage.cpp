#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "train/gpu_check/process.h"
#include "train/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

// One rank of a group on this machine, as torchrun would start it. A host of its own for NCCL, which refuses two
// ranks of one host on one GPU; so they talk through sockets, as between real hosts.
Command rank_of(std::vector<std::string> argv, int rank, int ranks, int port) {
  const auto text = [](int number) { return std::to_string(number); };
  return {std::move(argv),
          {{"RANK", text(rank)},
           {"WORLD_SIZE", text(ranks)},
           {"LOCAL_RANK", "0"},
           {"MASTER_ADDR", "127.0.0.1"},
           {"MASTER_PORT", text(port)},
           {"NCCL_HOSTID", "gpu-check-" + text(rank)},
           {"NCCL_SOCKET_IFNAME", "lo"},
           {"NCCL_NET", "Socket"},
           {"NCCL_IB_DISABLE", "1"},
           {"NCCL_P2P_DISABLE", "1"},
           {"NCCL_SHM_DISABLE", "1"},
           {"NCCL_NVLS_ENABLE", "0"},
           {"NCCL_MNNVL_ENABLE", "0"},
           {"NCCL_CUMEM_ENABLE", "0"},
           {"NCCL_MAX_CTAS", "2"},
           {"NCCL_BUFFSIZE", "1048576"},
           {"NCCL_ALGO", "Ring"},
           {"NCCL_PROTO", "Simple"},
           {"NCCL_DEBUG", "WARN"}}};
}

Result group_result(const std::string& name, const std::vector<Outcome>& outcomes) {
  Result result{"nccl", name};
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    result.seconds = std::max(result.seconds, outcomes[rank].seconds);
    if (outcomes[rank].ok() || result.status == Status::failed) continue;
    result.status = Status::failed;
    result.note = "rank " + std::to_string(rank) + ": " +
                  (outcomes[rank].timed_out ? "not done in its time; " : "") + outcomes[rank].last_line();
  }
  return result;
}

// The checksum of the weights that a run ended with; "" where it did not come to its end.
std::string checksum_of(const std::string& folder) {
  std::ifstream lines(folder + "/metrics.jsonl");
  std::string checksum;
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (record.is_object() && record.value("event", "") == "end")
      checksum = record.value("parameter_checksum", "");
  }
  return checksum;
}

std::vector<std::string> training(const Options& options, const std::string& backend, int ranks,
                                  const std::string& method, const std::string& folder) {
  return {options.bin + "/train",       "model.name=resnet20",
          "data.name=synthetic_images", "data.train_size=512",
          "data.test_size=64",          "data.batch_size=16",
          "train.device=cuda",          "train.deterministic=true",
          "train.max_steps=6",          "compress.name=" + method,
          "compress.density=0.01",      "compress.capacity=2",
          "dist.backend=" + backend,    "dist.ranks=" + std::to_string(ranks),
          "dist.timeout_s=60",          "output.dir=" + folder,
          "output.overwrite=true",      "--quiet"};
}

}  // namespace

void run_nccl(const Options& options, Report& report) {
  const std::string train = options.bin + "/train";
  if (!is_program(train)) {
    report.add({"nccl", "collectives", Status::skipped, 0, {}, train + " is not there"});
    return;
  }
  int port = 29531;
  for (const int ranks : {1, 2, 4}) {
    std::vector<Command> group;
    for (int rank = 0; rank < ranks; ++rank)
      group.push_back(rank_of({train, "train.device=cuda", "dist.backend=nccl",
                               "dist.ranks=" + std::to_string(ranks), "dist.timeout_s=30", "--check-network"},
                              rank, ranks, port));
    ++port;
    const auto outcomes = run_all(group, 45);
    report.add(group_result("every collective exact, " + std::to_string(ranks) + " rank(s)", outcomes));
    if (!outcomes.front().ok()) break;  // more of them would only wait
  }
  for (const std::string method : {"topk", "gaussiank", "dgc", "regtopk"}) {
    const std::string with_nccl = options.out + "/nccl-" + method,
                      with_threads = options.out + "/threads-" + method;
    std::vector<Command> group;
    for (int rank = 0; rank < 2; ++rank)
      group.push_back(rank_of(training(options, "nccl", 2, method, with_nccl), rank, 2, port));
    ++port;
    Result result = group_result(method + " with 2 processes: the weights of 2 threads", run_all(group, 40));
    const Outcome threads = run({training(options, "threads", 2, method, with_threads)}, 40);
    if (result.status == Status::passed && !threads.ok())
      result.status = Status::failed, result.note = "with threads: " + threads.last_line();
    if (result.status == Status::passed) {
      const std::string a = checksum_of(with_nccl), b = checksum_of(with_threads);
      if (a.empty() || a != b) result.status = Status::failed, result.note = "weights " + a + " and " + b;
    }
    const bool go_on = result.status == Status::passed;
    report.add(std::move(result));
    if (!go_on && threads.ok()) break;
  }
}

}  // namespace topknot::gpu_check
