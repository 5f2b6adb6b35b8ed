#include "train/network_check.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "dist/rendezvous/socket.h"
#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "train/checks.h"
#include "train/plan/choose.h"
#include "train/setup.h"
#include "train/start.h"

namespace topknot {
namespace {

constexpr double kTimeout = 60;  // seconds, where dist.timeout_s is not given
struct Size {
  std::size_t bytes;
  int repetitions;  // after one that sets up connections and is not counted
};
constexpr Size kSizes[] = {{1 << 10, 15}, {1 << 20, 7}, {16 << 20, 3}};

std::byte byte_of(int rank, int round, std::size_t i) {
  return static_cast<std::byte>(
      (static_cast<std::size_t>(rank) * 37 + static_cast<std::size_t>(round) + i * 11 + i / 256) & 0xFF);
}
// Sums of these over 1,024 ranks are whole numbers below 2^24: exact in any order.
float factor_of(int rank) {
  return static_cast<float>(rank % 16 + 1);
}
float number_of(int round, std::size_t i) {
  return static_cast<float>((i + static_cast<std::size_t>(round)) % 251 + 1);
}

[[noreturn]] void damaged(const Communicator& host, const std::string& what, std::size_t at) {
  throw Error(fmt::format("rank {}: {} brought a wrong value at place {}: data is damaged on its way",
                          host.rank(), what, at));
}

// The interface and address of this rank towards `host`: "eth0 10.0.0.1", or "" if unknown.
std::string way_to(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const Fd fd(socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const bool connected = connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0;  // sends nothing
  freeaddrinfo(found);
  if (!connected) return "";
  const std::string address = local_address(fd.get());
  std::string name = "?";
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) == 0) {
    for (const ifaddrs* at = interfaces; at; at = at->ifa_next) {
      if (!at->ifa_addr) continue;
      const bool v6 = at->ifa_addr->sa_family == AF_INET6;
      if (!v6 && at->ifa_addr->sa_family != AF_INET) continue;
      char text[NI_MAXHOST] = "";
      getnameinfo(at->ifa_addr, v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), text, sizeof text, nullptr,
                  0, NI_NUMERICHOST);
      if (address == text) name = at->ifa_name;
    }
    freeifaddrs(interfaces);
  }
  return name + " " + address;
}

// "eth0 10.0.0.1" of every rank. If a host's name leads to a loopback address: the way to another rank.
std::vector<std::string> ways(Communicator& host, const LaunchPlan& plan, const std::string& interface) {
  const auto loops = [](const std::string& way) { return is_loopback(way.substr(way.find(' ') + 1)); };
  std::string mine = plan.host.empty() ? "this process" : way_to(plan.host);
  std::vector<std::string> all = gather_texts(host, mine);
  for (const std::string& other : all)
    if (!plan.host.empty() && loops(mine) && !loops(other)) mine = way_to(other.substr(other.find(' ') + 1));
  if (!interface.empty()) mine = interface;
  return gather_texts(host, mine);
}

NetworkPath host_path(Communicator& host) {
  const auto timed = [](const auto& call) {
    const auto start = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  NetworkPath path;
  path.over = "host, " + host.backend();
  path.gather = [&host, timed](std::span<const std::byte> mine, std::span<std::byte> all) {
    std::vector<std::vector<std::byte>> blocks;
    const double seconds = timed([&] { host.all_gather(mine, blocks); });
    for (std::size_t r = 0; r < blocks.size(); ++r)
      std::copy(blocks[r].begin(), blocks[r].end(),
                all.begin() + static_cast<std::ptrdiff_t>(r * mine.size()));
    return seconds;
  };
  path.sum = [&host, timed](std::span<float> data) {
    return timed([&] { host.all_reduce(data, SumOrder::library); });
  };
  return path;
}

void print_table(const std::vector<NetworkRow>& rows) {
  std::printf("\n%-16s %-12s %12s %12s %10s\n", "over", "collective", "bytes", "ms", "GB/s");
  for (const NetworkRow& row : rows)
    std::printf("%-16s %-12s %12zu %12.3f %10.3f\n", row.over.c_str(), row.operation.c_str(), row.bytes,
                1e3 * row.seconds, row.gigabytes_per_second);
}

// Prints what compress.name=auto would do with the run's model and data, if every rank can load them.
void recommend(Communicator& host, const Config& config) {
  RunData data;
  std::string problem;
  try {
    throw_problems(check_config(config));
    data = load_data(config);
    throw_problems(check_run(config, data).problems);
  } catch (const UserError& error) {
    problem = error.what();
  }
  for (const std::string& of_rank : gather_texts(host, problem)) {
    if (of_rank.empty()) continue;
    if (host.rank() == 0) std::printf("\nno method is recommended: %s\n", of_rank.c_str());
    return;
  }
  settle_threads(host, config);
  const std::string text = AutoMethod(choosing(config)).recommendation(*data.train, host);
  if (host.rank() == 0) std::printf("\n%s\n", text.c_str());
}

void check_rank(Communicator& host, const LoadedConfig& loaded, const LaunchPlan& plan, double timeout_s) {
  const Config& config = loaded.config;
  check_same(host, "the version of the program", program_version());
  // Under gloo a GPU's gradients are sent through host memory.
  const bool on_gpu =
      config.dist.backend != "gloo" && parse_device(config.train.device).kind == DeviceKind::cuda;
  const int gpu = on_gpu ? gpu_of(plan, gpu_count()) : 0;
  const auto hosts = gather_texts(host, host_name()), addresses = ways(host, plan, config.dist.interface),
             gpus = gather_texts(host, on_gpu ? gpu_name(gpu) : "-");
  if (host.rank() == 0) {
    std::printf("%d ranks, dist.backend %s\n\n%5s  %-24s %-28s %s\n", host.size(),
                config.dist.backend.c_str(), "rank", "host", "talks from", "GPU");
    for (std::size_t r = 0; r < hosts.size(); ++r)
      std::printf("%5zu  %-24s %-28s %s\n", r, hosts[r].c_str(), addresses[r].c_str(), gpus[r].c_str());
    std::fflush(stdout);
  }
  std::vector<NetworkRow> rows = check_path(host, host_path(host));
  if (on_gpu)
    for (NetworkRow& row : check_gpu_path(host, gpu, timeout_s)) rows.push_back(std::move(row));
  host.barrier();  // every rank has found every value right
  if (host.rank() == 0) {
    print_table(rows);
    std::puts("\nevery value arrived as it should");
    std::fflush(stdout);
  }
  if (!topknot::on_gpu(config) && host.size() > 1) recommend(host, config);
  std::fflush(stdout);
}

}  // namespace

std::vector<NetworkRow> check_path(Communicator& host, const NetworkPath& path) {
  const auto ranks = static_cast<std::size_t>(host.size());
  std::vector<NetworkRow> rows;
  for (const Size& size : kSizes) {
    const std::size_t block = std::max<std::size_t>(1, size.bytes / ranks);
    std::vector<std::byte> mine(block), all(block * ranks);
    std::vector<double> times;
    for (int round = 0; round <= size.repetitions; ++round) {
      for (std::size_t i = 0; i < block; ++i) mine[i] = byte_of(host.rank(), round, i);
      std::fill(all.begin(), all.end(), std::byte{0});
      host.barrier();
      times.push_back(path.gather(mine, all));
      for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t i = 0; i < block; ++i)
          if (all[r * block + i] != byte_of(static_cast<int>(r), round, i))
            damaged(host, "all_gather over " + path.over, r * block + i);
    }
    const double seconds = quantile({times.begin() + 1, times.end()}, 0.5);
    rows.push_back({path.over, "all_gather", block * ranks, seconds,
                    static_cast<double>(block * (ranks - 1)) / seconds / 1e9});
  }
  float factors = 0;
  for (int r = 0; r < host.size(); ++r) factors += factor_of(r);
  for (const Size& size : kSizes) {
    std::vector<float> data(size.bytes / sizeof(float));
    std::vector<double> times;
    for (int round = 0; round <= size.repetitions; ++round) {
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = factor_of(host.rank()) * number_of(round, i);
      host.barrier();
      times.push_back(path.sum(data));
      for (std::size_t i = 0; i < data.size(); ++i)
        if (data[i] != factors * number_of(round, i)) damaged(host, "all_reduce over " + path.over, i);
    }
    const double seconds = quantile({times.begin() + 1, times.end()}, 0.5);
    const double sent = 2.0 * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
    rows.push_back({path.over, "all_reduce", size.bytes, seconds,
                    sent * static_cast<double>(size.bytes) / seconds / 1e9});
  }
  return rows;
}

int start_network_check(LoadedConfig loaded, char* const* argv) {
  DistOptions options = dist_options(loaded);
  if (loaded.origin("dist.timeout_s") == Origin::default_value) options.timeout_s = kTimeout;
  const LaunchPlan plan = plan_launch(options, process_environment());
  if (plan.kind == LaunchPlan::Kind::threads) settle_backend(loaded, plan, nullptr);
  StartHooks hooks;
  hooks.joined = [&](Communicator& host) { settle_backend(loaded, plan, &host); };
  hooks.load = hooks.check = hooks.make_directory = [] {};
  hooks.body = [&](Communicator& host) { check_rank(host, loaded, plan, options.timeout_s); };
  return start_ranks(plan, options, argv, hooks);
}

}  // namespace topknot
