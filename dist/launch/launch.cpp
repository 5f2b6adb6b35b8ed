#include "dist/launch/launch.h"

#include <fmt/format.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <vector>

#include "dist/rendezvous/socket.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

constexpr int most_ranks = 1024;

// This process by the variables of one launcher.
struct LauncherRank {
  std::string launcher;
  int rank = 0, size = 1, local_rank = -1;
  int local_size = 0;  // ranks of this machine; 0: not given
};

std::optional<int> number(const Environment& environment, const std::string& name) {
  const auto text = environment(name);
  if (!text || text->empty()) return std::nullopt;
  int value = 0;
  const char* end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < 0)
    throw UserError("the environment variable " + name + "='" + *text +
                    "' should be a number, as launchers set it; unset it or start with a launcher");
  return value;
}

struct Variables {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

std::optional<LauncherRank> read(const Environment& environment, const Variables& names) {
  const auto rank = number(environment, names.rank);
  const auto size = number(environment, names.size);
  // A job scheduler may set the size alone for what it runs once.
  if (!rank) return std::nullopt;
  if (!size)
    throw UserError(fmt::format("the environment has {} but not {}; a launcher ({}) sets both", names.rank,
                                names.size, names.launcher));
  if (*size < 1 || *rank >= *size)
    throw UserError(fmt::format("the environment says rank {} of {} ({}, {}), which cannot be", *rank, *size,
                                names.rank, names.size));
  // Slurm's is a list by host, such as "4(x2),3".
  const int local_size = std::atoi(environment(names.local_size).value_or("").c_str());
  return LauncherRank{names.launcher, *rank, *size, number(environment, names.local_rank).value_or(-1),
                      local_size};
}

// The innermost launcher. srun's variables are also there inside an allocation in which torchrun or mpirun
// runs, so they count only where no other launcher's are set.
std::optional<LauncherRank> find_launcher(const Environment& environment) {
  static const Variables inner[] = {
      {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
      {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
  };
  std::optional<LauncherRank> found;
  for (const auto& names : inner) {
    const auto launched = read(environment, names);
    if (!launched) continue;
    if (found && (found->rank != launched->rank || found->size != launched->size))
      throw UserError(fmt::format(
          "the variables of two launchers contradict each other: {} says rank {} of {}, {} says rank {} "
          "of {}; start with one of them, or unset the variables of the other",
          found->launcher, found->rank, found->size, launched->launcher, launched->rank, launched->size));
    if (!found) found = launched;
  }
  if (found) return found;
  // A batch script has its allocation's SLURM_PROCID and SLURM_NTASKS without being one of its tasks; srun
  // alone sets SLURM_STEP_NUM_TASKS. Of one task it is a shell (srun --pty bash).
  if (number(environment, "SLURM_STEP_NUM_TASKS").value_or(1) == 1) return std::nullopt;
  return read(environment,
              {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"});
}

void set_master(LaunchPlan& plan, const DistOptions& options, const Environment& environment) {
  HostPort master;
  const auto address = environment("MASTER_ADDR");
  const auto port = number(environment, "MASTER_PORT");
  if (!options.master.empty()) {
    master = parse_host_port(options.master, "dist.master");
  } else if (address && !address->empty() && port) {
    if (*port >= 65535) throw UserError(fmt::format("MASTER_PORT is {}; it must be below 65535", *port));
    master = {without_brackets(*address), *port + 1};  // torchrun itself may sit on the port
  } else if (plan.launcher == "torchrun") {
    throw UserError(
        "torchrun's MASTER_ADDR and MASTER_PORT are not both set; give dist.master=HOST:PORT, the machine of "
        "rank 0 and a free port on it");
  } else {
    throw UserError(plan.launcher +
                    " does not say where the ranks can meet: give dist.master=HOST:PORT, the "
                    "machine of rank 0 and a free port on it, the same for all ranks");
  }
  plan.host = master.host;
  plan.port = master.port;
}

// A copy that run_spawned() started: the file that its variables name is open here.
std::optional<LaunchPlan> spawned(const Environment& environment) {
  const auto proof = environment("TOPKNOT_LAUNCH");
  const int file = proof ? std::atoi(proof->c_str()) : -1;
  if (!proof || *proof != file_name(file)) return std::nullopt;
  const auto rank = number(environment, "TOPKNOT_RANK");
  const auto size = number(environment, "TOPKNOT_RANKS");
  const auto master = environment("TOPKNOT_MASTER");
  if (!rank || !size || !master) return std::nullopt;
  LaunchPlan plan;
  plan.kind = LaunchPlan::Kind::process;
  plan.launcher = "spawn";
  plan.rank = plan.local_rank = *rank;
  plan.size = *size;
  const HostPort place = parse_host_port(*master, "TOPKNOT_MASTER");
  plan.host = place.host;
  plan.port = place.port;
  plan.token = environment("TOPKNOT_TOKEN").value_or("");
  plan.joins_after = number(environment, "TOPKNOT_JOINS_AFTER").value_or(0);
  plan.run = environment("TOPKNOT_RUN").value_or("");
  plan.views = [file] {
    std::string text;
    char bytes[4096];
    for (ssize_t n; (n = pread(file, bytes, sizeof bytes, static_cast<off_t>(text.size()))) > 0;)
      text.append(bytes, static_cast<std::size_t>(n));
    return text;
  };
  return plan;
}

}  // namespace

std::string job_token(const std::string& launcher, const Environment& environment) {
  if (const auto given = environment("TOPKNOT_TOKEN"); given && !given->empty())
    return given->substr(0, kLongestToken);
  const auto text = [&](const char* name) { return environment(name).value_or(""); };
  std::string job;
  if (launcher == "torchrun") job = text("TORCHELASTIC_RUN_ID");
  if (launcher == "mpirun") job = text("PMIX_NAMESPACE");
  if (launcher == "srun" && !text("SLURM_STEP_ID").empty())
    job = text("SLURM_JOB_ID") + "." + text("SLURM_STEP_ID");
  if (!job.empty()) job = launcher + " " + job;
  return job.substr(0, kLongestToken);
}

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

std::string file_name(int descriptor) {
  struct stat status {};
  return fstat(descriptor, &status) == 0 ? fmt::format("{}:{}", descriptor, status.st_ino) : "";
}

LaunchPlan plan_launch(const DistOptions& options, const Environment& environment) {
  const auto launched = find_launcher(environment);
  const bool task = launched && launched->size > 1;
  if (options.token.size() > kLongestToken)
    throw UserError(fmt::format("dist.token: {} bytes; at most {}", options.token.size(), kLongestToken));
  const bool chooses = options.backend == "auto";
  const bool processes = chooses ? task : backends().find(options.backend).join != nullptr;
  if (options.ranks && (*options.ranks < 1 || *options.ranks > most_ranks))
    throw UserError(fmt::format("dist.ranks: {} is not from 1 to {}", *options.ranks, most_ranks));
  if (processes && !chooses)
    if (const auto plan = spawned(environment)) return *plan;

  LaunchPlan plan;
  if (!processes) {
    if (task && !chooses)
      throw UserError(
          fmt::format("{} started {} processes, but dist.backend is {}, which runs all ranks in one; "
                      "give dist.backend=gloo, or nccl on GPUs, or auto",
                      launched->launcher, launched->size, options.backend));
    plan.size = options.ranks.value_or(1);
    return plan;
  }
  if (launched) {
    if (options.ranks && options.ranks_insist && *options.ranks != launched->size)
      throw UserError(fmt::format(
          "dist.ranks is {}, but {} started {} processes; leave dist.ranks out, or make them agree",
          *options.ranks, launched->launcher, launched->size));
    plan.kind = LaunchPlan::Kind::process;
    plan.launcher = launched->launcher;
    plan.rank = launched->rank;
    plan.size = launched->size;
    plan.local_rank = launched->local_rank;
    if (plan.size > 1) set_master(plan, options, environment);
    plan.coordinated = plan.size > 1 && options.min_ranks > 0;
    // The process that coordinates is none of the launcher's.
    plan.token = job_token(plan.coordinated ? "" : plan.launcher, environment);
    return plan;
  }
  plan.size = options.ranks.value_or(1);
  plan.kind = plan.size > 1 ? LaunchPlan::Kind::spawn : LaunchPlan::Kind::process;
  if (plan.size > 1) {
    plan.launcher = "spawn";
    plan.host = "127.0.0.1";
    if (!options.master.empty()) plan.port = parse_host_port(options.master, "dist.master").port;
  }
  return plan;
}

int local_ranks(int ranks, const Environment& environment) {
  const auto launched = find_launcher(environment);
  // Ranks that this program starts itself, threads or copies, are all here.
  if (!launched || launched->size != ranks || launched->local_size < 1) return ranks;
  return std::min(ranks, launched->local_size);
}

int gpu_of(const LaunchPlan& plan, int gpus) {
  if (plan.kind != LaunchPlan::Kind::process || gpus <= 1) return 0;
  return (plan.local_rank >= 0 ? plan.local_rank : plan.rank) % gpus;
}

void end_with_launcher() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto parent = number(process_environment(), "TOPKNOT_PARENT");
  if (parent && getppid() != *parent) throw Error("the launcher of this rank has died");
}

std::unique_ptr<Communicator> join_group(const LaunchPlan& plan, const DistOptions& options) {
  TOPKNOT_CHECK(plan.kind == LaunchPlan::Kind::process, "only a process joins a group");
  if (plan.launcher == "spawn") end_with_launcher();
  JoinOptions group;
  group.rank = plan.rank;
  group.size = plan.size;
  group.host = plan.host;
  group.port = plan.port;
  group.launcher_serves = plan.launcher == "spawn" || plan.coordinated;
  group.serve_store = plan.rank == 0 && !group.launcher_serves;
  group.interface = options.interface;
  group.nccl = options.nccl;
  group.timeout_s = options.timeout_s;
  group.token = options.token.empty() ? plan.token : options.token;
  group.check_calls = options.check_calls;
  group.meeting = plan.meeting;
  // auto may come to be nccl, whose host side is gloo as well.
  return backends().find(options.backend == "auto" ? "nccl" : options.backend).join(group);
}

BackendChoice choose_backend(Communicator& host, const std::string& problem, const std::string& place) {
  const auto problems = gather_texts(host, problem), places = gather_texts(host, place);
  std::map<std::string, std::size_t> seen;
  for (std::size_t r = 0; r < problems.size(); ++r) {
    if (!problems[r].empty()) return {"gloo", fmt::format("rank {}: {}", r, problems[r])};
    const auto [first, is_new] = seen.emplace(places[r], r);
    if (!is_new) return {"gloo", fmt::format("ranks {} and {} have the same GPU", first->second, r)};
  }
  return {"nccl", "every rank has a GPU of its own"};
}

void run_process_rank(const LaunchPlan& plan, const DistOptions& options,
                      const std::function<void(Communicator&)>& body) {
  const auto communicator = join_group(plan, options);
  try {
    body(*communicator);
  } catch (const std::exception& error) {
    communicator->abort(explain(error));
    throw;
  } catch (...) {
    communicator->abort("an unknown error");
    throw;
  }
}

std::vector<int> parse_core_list(const std::string& list) {
  std::vector<int> cores;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const char *at = part.data(), *const end = at + part.size();
    int first = 0, last = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc()) return {};
    last = first;
    if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || read.ptr != end || first < 0 || last < first || last >= CPU_SETSIZE)
      return {};
    for (int core = first; core <= last; ++core) cores.push_back(core);
  }
  return cores;
}

int keep_to_cores_near(const std::string& pci_device, const std::filesystem::path& devices) {
  std::string name = pci_device, list;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::getline(std::ifstream(devices / name / "local_cpulist"), list);
  cpu_set_t allowed, near;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
  CPU_ZERO(&near);
  for (const int core : parse_core_list(list)) CPU_SET(core, &near);
  CPU_AND(&near, &near, &allowed);
  const int count = CPU_COUNT(&near);
  if (count == 0 || count == CPU_COUNT(&allowed) || sched_setaffinity(0, sizeof near, &near) != 0) return 0;
  return count;
}

double cpu_quota(const std::filesystem::path& groups, const std::filesystem::path& mount) {
  double least = std::numeric_limits<double>::infinity();
  std::ifstream lines(groups);
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" is version 2, "4:cpu,cpuacct:/a/b" version 1.
    const auto first = line.find(':'), second = line.find(":/", first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == line.npos) continue;
    // A container may see its own group as the mount's root: groups that are not there are passed over.
    for (std::filesystem::path group = line.substr(second + 2);; group = group.parent_path()) {
      const std::filesystem::path folder = mount / (unified ? "" : "cpu") / group;
      double quota = 0, period = 0;
      if (unified) {
        std::ifstream(folder / "cpu.max") >> quota >> period;  // "max 100000" if there is none
      } else {
        std::ifstream(folder / "cpu.cfs_quota_us") >> quota;  // -1 if there is none
        std::ifstream(folder / "cpu.cfs_period_us") >> period;
      }
      if (quota > 0 && period > 0) least = std::min(least, quota / period);
      if (group.empty()) break;
    }
  }
  return least;
}

int usable_cores() {
  // OpenMP knows the mask that the process began with, which OMP_PROC_BIND narrows for this thread.
  const double cores = std::min<double>(omp_get_num_procs(), cpu_quota());
  return std::max(1, static_cast<int>(cores));
}

}  // namespace topknot
