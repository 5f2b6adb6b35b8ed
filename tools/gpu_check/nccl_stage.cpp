#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "nn/base/file.h"
#include "nn/base/text.h"
#include "tools/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

const char* const kEarlier = "after a failure: ranks that hang would only use up the time";

// A port for MASTER_PORT: the ranks meet one above it.
int free_port() {
  const Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = fd.valid() && bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0;
  return bound ? ntohs(address.sin_port) - 1 : 29530;
}

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

std::vector<Outcome> run_group(const std::vector<std::string>& argv, int ranks, double seconds) {
  std::vector<Command> group;
  const int port = free_port();
  for (int rank = 0; rank < ranks; ++rank) group.push_back(rank_of(argv, rank, ranks, port));
  return run_all(group, seconds);
}

// Failed where any rank failed; the note is that of one that ended by itself rather than of one that was killed.
Result group_result(const std::string& name, const std::vector<Outcome>& outcomes) {
  Result result{"nccl", name};
  const Outcome* worst = nullptr;
  for (const Outcome& outcome : outcomes) {
    result.seconds = std::max(result.seconds, outcome.seconds);
    if (!outcome.ok() && (!worst || (worst->timed_out && !outcome.timed_out))) worst = &outcome;
  }
  if (!worst) return result;
  return failure(std::move(result), *worst,
                 fmt::format("rank {}: {}", worst - outcomes.data(), worst->reason("train")));
}

std::vector<std::string> training(const Options& options, const std::string& backend,
                                  const std::string& method, const std::string& folder) {
  return {options.bin + "/train",       "model.name=resnet20",
          "data.name=synthetic_images", "data.train_size=512",
          "data.test_size=64",          "data.batch_size=16",
          "train.device=cuda",          "train.deterministic=true",
          "train.max_steps=6",          "compress.name=" + method,
          "compress.density=0.01",      "compress.capacity=2",
          "dist.backend=" + backend,    "dist.ranks=2",
          "dist.timeout_s=30",          "output.dir=" + folder,
          "output.overwrite=true",      "--quiet"};
}

Result compare_training(const Options& options, const std::string& method, double seconds) {
  const std::string with_nccl = fresh_run_directory(options.out, "nccl-" + method),
                    with_threads = fresh_run_directory(options.out, "threads-" + method);
  const StageClock clock(seconds);
  Result result = group_result(method + " with 2 processes: the weights of 2 threads",
                               run_group(training(options, "nccl", method, with_nccl), 2, 0.6 * seconds));
  if (result.status != Status::passed) return result;
  const Outcome threads = run({training(options, "threads", method, with_threads)}, clock.left());
  result.seconds += threads.seconds;
  if (!threads.ok()) return failure(std::move(result), threads, "with threads: " + threads.reason("train"));
  const std::string a = end_of_run(with_nccl).parameter_checksum,
                    b = end_of_run(with_threads).parameter_checksum;
  if (a.empty() || a != b)
    return failure(
        std::move(result), threads,
        fmt::format("weights {} with processes, {} with threads", a.empty() ? "?" : a, b.empty() ? "?" : b));
  return result;
}

}  // namespace

void run_nccl(const Options& options, Report& report) {
  const StageClock clock(options.seconds);
  const std::string train = options.bin + "/train";
  if (!is_program(train)) return skip_all("nccl", train + " is not there", report);
  bool works = true;
  const auto add = [&](const std::string& name, const auto& check) {
    if (!works || clock.used_up()) {
      report.add({"nccl", name, Status::skipped, 0, {}, works ? kUsedUp : kEarlier});
      return;
    }
    Result result = check();
    works = result.status == Status::passed;
    report.add(std::move(result));
  };
  for (const int ranks : {1, 2, 4}) {
    const std::string name = "every collective exact, " + count_text(ranks, "rank");
    add(name, [&] {
      const std::vector<std::string> argv{train,
                                          "train.device=cuda",
                                          "dist.backend=nccl",
                                          fmt::format("dist.ranks={}", ranks),
                                          "dist.timeout_s=30",
                                          "--check-network"};
      return group_result(name, run_group(argv, ranks, std::min(0.27 * options.seconds, clock.left())));
    });
  }
  bool alone = works;  // a method that differs does not keep the others from being tried
  for (const std::string method : {"topk", "gaussiank", "dgc", "regtopk"}) {
    works = alone;
    add(method + " with 2 processes: the weights of 2 threads",
        [&] { return compare_training(options, method, std::min(0.4 * options.seconds, clock.left())); });
  }
}

}  // namespace topknot::gpu_check
