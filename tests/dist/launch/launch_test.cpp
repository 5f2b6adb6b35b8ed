#include "dist/launch/launch.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>

#include "dist/comm/communicator.h"
#include "dist/rendezvous/socket.h"
#include "tests/dist/ranks.h"

namespace topknot {
namespace {

using Variables = std::map<std::string, std::string>;

Environment from(const Variables& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

DistOptions gloo(std::optional<int> ranks = {}, std::string master = "") {
  DistOptions options;
  options.backend = "gloo";
  options.ranks = ranks;
  options.master = std::move(master);
  return options;
}

std::string error_of(const DistOptions& options, const Variables& variables) {
  return error_text<UserError>([&] { plan_launch(options, from(variables)); });
}

// How the ranks start, and where this one is among them.
std::string text(const LaunchPlan& plan) {
  if (plan.kind == LaunchPlan::Kind::threads) return fmt::format("{} threads", plan.size);
  if (plan.kind == LaunchPlan::Kind::spawn)
    return fmt::format("{} copies at {}", plan.size, host_port_text(plan.host, plan.port));
  return fmt::format("rank {} of {} by {}, local {}, at {}", plan.rank, plan.size, plan.launcher,
                     plan.local_rank, host_port_text(plan.host, plan.port));
}

const Variables torchrun = {{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"MASTER_ADDR", "node0"},
                            {"MASTER_PORT", "29500"}};
const Variables mpirun = {
    {"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
const Variables batch_script = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "16"}, {"SLURM_LOCALID", "0"}};
const Variables srun = {
    {"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "0"}};

Variables both(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

// Of a copy that this process, with the file `proof`, started.
Variables copy_of(const Fd& proof) {
  return {{"TOPKNOT_RANK", "2"},
          {"TOPKNOT_RANKS", "4"},
          {"TOPKNOT_MASTER", "127.0.0.1:4711"},
          {"TOPKNOT_LAUNCH", file_name(proof.get())}};
}
Fd new_proof() {
  return Fd(memfd_create("test", MFD_CLOEXEC));
}

}  // namespace

TEST_CASE("settings of NCCL become variables of its environment") {
  using Variables = std::vector<std::pair<std::string, std::string>>;
  CHECK(nccl_variables("").empty());
  CHECK(nccl_variables(" ALGO=Ring  NCCL_IB_HCA==mlx5_0:1,mlx5_1 ") ==
        Variables{{"NCCL_ALGO", "Ring"}, {"NCCL_IB_HCA", "=mlx5_0:1,mlx5_1"}});
  for (const char* wrong : {"Ring", "ALGO", "ALGO=", "=Ring", "algo=Ring", "ALGO=Ring x"})
    CHECK_THROWS_AS(nccl_variables(wrong), UserError);
}

TEST_CASE("without a launcher, threads runs dist.ranks threads and gloo starts copies") {
  DistOptions options;
  CHECK(text(plan_launch(options, from({}))) == "1 threads");
  options.ranks = 4;
  CHECK(text(plan_launch(options, from({}))) == "4 threads");
  CHECK(text(plan_launch(gloo(4), from({}))) == "4 copies at 127.0.0.1:0");
  CHECK(text(plan_launch(gloo(4, "127.0.0.1:4711"), from({}))) == "4 copies at 127.0.0.1:4711");
  const auto alone = plan_launch(gloo(), from({}));
  CHECK(alone.kind == LaunchPlan::Kind::process);
  CHECK(alone.size == 1);
}

TEST_CASE("a launcher gives rank and size; torchrun the master too, a port above its own") {
  const auto at = [](const std::string& master, const Variables& variables) {
    return text(plan_launch(gloo({}, master), from(variables)));
  };
  CHECK(at("", torchrun) == "rank 5 of 8 by torchrun, local 1, at node0:29501");
  CHECK(at("node9:1234", torchrun) == "rank 5 of 8 by torchrun, local 1, at node9:1234");
  CHECK(at("node0:29500", mpirun) == "rank 3 of 4 by mpirun, local 1, at node0:29500");
  // Not the allocation's tasks.
  CHECK(at("[fe80::1]:29500", srun) == "rank 2 of 4 by srun, local 0, at [fe80::1]:29500");
  CHECK(at("node0:29500", {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}) ==
        "rank 1 of 2 by PMI, local -1, at node0:29500");
  for (const auto& [address, place] :
       {std::pair("::1", "[::1]"), std::pair("[::1]", "[::1]"), std::pair("node0", "node0")})
    CHECK(at("", both(srun, {{"MASTER_ADDR", address}, {"MASTER_PORT", "29500"}})) ==
          std::string("rank 2 of 4 by srun, local 0, at ") + place + ":29501");
  // Without a master mpirun and srun are an error that names dist.master.
  CHECK(says(error_of(gloo(), mpirun), {"mpirun", "dist.master=HOST:PORT"}));
  CHECK(says(error_of(gloo(), srun), {"srun", "dist.master=HOST:PORT"}));
  CHECK(plan_launch(gloo(), from({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}})).size == 1);
}

TEST_CASE("the ranks of this machine are those that the launcher names, or all that this program starts") {
  CHECK(local_ranks(4, from({})) == 4);
  CHECK(local_ranks(8, from(torchrun)) == 8);
  CHECK(local_ranks(8, from(both(torchrun, {{"LOCAL_WORLD_SIZE", "2"}}))) == 2);
  CHECK(local_ranks(4, from(both(mpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}}))) == 3);
  CHECK(local_ranks(4, from(both(srun, {{"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}}))) == 2);
  CHECK(local_ranks(4, from({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}})) == 2);
  for (const char* wrong : {"", "x", "0", "-1", "99"})
    CHECK(local_ranks(8, from(both(torchrun, {{"LOCAL_WORLD_SIZE", wrong}}))) == 8);
  // One task, which starts three ranks itself.
  CHECK(local_ranks(3, from({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_WORLD_SIZE", "1"}})) == 3);
}

TEST_CASE("two launchers that contradict each other are an error; one inside srun's allocation is not") {
  CHECK(says(error_of(gloo({}, "node0:29500"), both(torchrun, mpirun)),
             {"torchrun says rank 5 of 8", "mpirun says rank 3 of 4"}));
  CHECK(plan_launch(gloo(), from(both(torchrun, srun))).launcher == "torchrun");
  CHECK(plan_launch(gloo({}, "node0:29500"), from(both(mpirun, srun))).launcher == "mpirun");
}

TEST_CASE("a batch script and a shell of srun start the ranks that they ask for") {
  for (const Variables& variables : {batch_script, both({{"SLURM_STEP_NUM_TASKS", "1"}}, batch_script),
                                     both({{"SLURM_NTASKS", "1"}}, batch_script)}) {
    auto options = gloo(4);
    options.ranks_insist = true;
    CHECK(text(plan_launch(options, from(variables))) == "4 copies at 127.0.0.1:0");
  }
}

TEST_CASE("dist.ranks that contradicts the launcher is an error if this run was given it, else ignored") {
  auto given = gloo(4);
  CHECK(plan_launch(given, from(torchrun)).size == 8);
  given.ranks_insist = true;
  CHECK(says(error_of(given, torchrun), {"dist.ranks is 4", "torchrun started 8"}));
  given.ranks = 8;
  CHECK(error_of(given, torchrun).empty());
}

TEST_CASE("auto is threads by itself and in a batch script, and a process under a launcher of several") {
  DistOptions options;
  options.backend = "auto";
  options.ranks = 4;
  for (const Variables& variables :
       {Variables{}, batch_script, Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
        Variables{{"TOPKNOT_RANK", "2"}, {"TOPKNOT_RANKS", "4"}, {"TOPKNOT_MASTER", "127.0.0.1:4711"}}}) {
    CHECK(text(plan_launch(options, from(variables))) == "4 threads");
  }
  CHECK(text(plan_launch(options, from(torchrun))) == "rank 5 of 8 by torchrun, local 1, at node0:29501");
  options.master = "node0:29500";
  CHECK(plan_launch(options, from(mpirun)).launcher == "mpirun");
  CHECK(plan_launch(options, from(srun)).launcher == "srun");
  // Threads under a launcher of several processes are an error, in a batch script they are not.
  for (const Variables& several : {torchrun, srun})
    CHECK(says(error_of(DistOptions{}, several), {"dist.backend=gloo"}));
  CHECK(error_of(DistOptions{}, batch_script).empty());
}

TEST_CASE("auto takes nccl where every rank has a GPU of its own, else gloo, on every rank the same") {
  const auto choice = [](std::vector<std::string> problems, std::vector<std::string> places) {
    std::set<std::pair<std::string, std::string>> choices;
    std::mutex mutex;
    run_ranks("threads", 3, [&](Communicator& host) {
      const auto r = static_cast<std::size_t>(host.rank());
      const BackendChoice mine = choose_backend(host, problems[r], places[r]);
      const std::lock_guard lock(mutex);
      choices.emplace(mine.backend, mine.reason);
    });
    REQUIRE(choices.size() == 1);
    return *choices.begin();
  };
  CHECK(choice({"", "", ""}, {"a 0", "a 1", "b 0"}).first == "nccl");
  CHECK((choice({"", "no GPU", ""}, {"a 0", "", "b 0"}) ==
         std::pair<std::string, std::string>("gloo", "rank 1: no GPU")));
  CHECK((choice({"", "", ""}, {"a 0", "b 0", "a 0"}) ==
         std::pair<std::string, std::string>("gloo", "ranks 0 and 2 have the same GPU")));
}

TEST_CASE("values that cannot be are errors that name the key or the variable") {
  DistOptions options;
  options.ranks = 0;
  CHECK(contains(error_of(options, {}), "dist.ranks"));
  options.ranks = 100000;
  CHECK(contains(error_of(options, {}), "dist.ranks"));
  options = {};
  options.backend = "glo";
  CHECK(contains(error_of(options, {}), "did you mean 'gloo'"));
  CHECK(contains(error_of(gloo(), {{"RANK", "x"}, {"WORLD_SIZE", "2"}}), "RANK='x'"));
  CHECK(contains(error_of(gloo(), {{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "rank 2 of 2"));
  CHECK(contains(error_of(gloo(), {{"RANK", "0"}}), "WORLD_SIZE"));
  for (const char* master : {"node0", "node0:", ":1", "node0:0", "node0:65536", "node0:12x"}) {
    const auto error = error_of(gloo({}, master), mpirun);
    INFO(master << ": " << error);
    CHECK(says(error, {"dist.master", "HOST:PORT"}));
  }
}

TEST_CASE("nccl starts as gloo does, and takes the GPU of its rank on the machine") {
  auto nccl = gloo(4);
  nccl.backend = "nccl";
  CHECK(plan_launch(nccl, from({})).kind == LaunchPlan::Kind::spawn);
  const auto plan = plan_launch(nccl, from(torchrun));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.size == 8);
  CHECK(gpu_of(plan, 4) == 1);
  CHECK(gpu_of(plan, 1) == 0);  // the launcher shows each process its own
  const auto silent = plan_launch(gloo({}, "node0:29500"), from({{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}}));
  CHECK(silent.local_rank == -1);
  CHECK(gpu_of(silent, 4) == 1);
  CHECK(gpu_of(plan_launch(DistOptions{}, from({})), 4) == 0);
  const Fd proof = new_proof();
  CHECK(gpu_of(plan_launch(nccl, from(copy_of(proof))), 4) == 2);
}

TEST_CASE("the job's token is the user's, else the launcher's name for the job, else none") {
  const auto token = [](const DistOptions& options, const Variables& variables) {
    return plan_launch(options, from(variables)).token;
  };
  CHECK(token(gloo(), torchrun) == "");
  CHECK(token(gloo(), both(torchrun, {{"TORCHELASTIC_RUN_ID", "17"}})) == "torchrun 17");
  CHECK(token(gloo({}, "a:1"), both(mpirun, {{"PMIX_NAMESPACE", "prte-1"}})) == "mpirun prte-1");
  CHECK(token(gloo({}, "a:1"), both(srun, {{"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "0"}})) == "srun 7.0");
  CHECK(token(gloo(), both(torchrun, {{"TORCHELASTIC_RUN_ID", "17"}, {"TOPKNOT_TOKEN", "mine"}})) == "mine");
  DistOptions options = gloo(2);
  options.token = std::string(300, 'x');
  CHECK(contains(error_of(options, {}), "dist.token: 300 bytes"));
}

TEST_CASE("a started copy finds its place; variables that were left over or set by hand make none") {
  Fd proof = new_proof();
  const Variables variables = copy_of(proof);
  const auto plan = plan_launch(gloo(4), from(variables));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.port == 4711);
  CHECK(text(plan).starts_with("rank 2 of 4 by spawn, "));
  Variables by_hand = variables;
  by_hand.erase("TOPKNOT_LAUNCH");
  CHECK(plan_launch(gloo(4), from(by_hand)).kind == LaunchPlan::Kind::spawn);
  by_hand["TOPKNOT_RANKS"] = "1";
  CHECK(plan_launch(gloo(1), from(by_hand)).launcher.empty());
  const Fd other = new_proof();  // of another launcher
  by_hand["TOPKNOT_LAUNCH"] = std::to_string(other.get()) + ":1";
  CHECK(plan_launch(gloo(4), from(by_hand)).kind == LaunchPlan::Kind::spawn);
  proof.reset();  // its launcher's file is not open here
  CHECK(plan_launch(gloo(4), from(variables)).kind == LaunchPlan::Kind::spawn);
}

TEST_CASE("lists of cores are read as Linux writes them") {
  CHECK(parse_core_list("0-3,8,10-11") == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_core_list("5") == std::vector<int>{5});
  for (const char* wrong : {"", "x", "3-1", "-1", "1-", "1;2", "0-99999999", "1 2"})
    CHECK(parse_core_list(wrong).empty());
}

TEST_CASE("a thread keeps to those of its cores that are next to a device") {
  const TempFolder temp;
  const auto kept = [&](const std::string& list) {
    fs::create_directories(temp.at("0000:3b:00.0"));
    std::ofstream(temp.at("0000:3b:00.0/local_cpulist")) << list << '\n';
    std::pair<int, int> result;  // what it says, and the thread's cores afterwards
    std::thread([&] {
      result.first = keep_to_cores_near("0000:3B:00.0", temp.at(""));
      cpu_set_t cores;
      sched_getaffinity(0, sizeof cores, &cores);
      result.second = CPU_COUNT(&cores);
    }).join();
    return result;
  };
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const int all = CPU_COUNT(&allowed);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  CHECK(kept("0-1023") == std::pair(0, all));
  CHECK(kept("") == std::pair(0, all));
  CHECK(kept("nonsense") == std::pair(0, all));
  CHECK(kept(std::to_string(first)) == (all > 1 ? std::pair(1, 1) : std::pair(0, all)));
  CHECK(keep_to_cores_near("0000:99:00.0", temp.at("")) == 0);
}

TEST_CASE("the CPU quota is the least of a process' control groups and those above them, version 1 or 2") {
  const TempFolder temp;
  const auto write = [&](const std::string& file, const std::string& text) {
    fs::create_directories(fs::path(temp.at(file)).parent_path());
    std::ofstream(temp.at(file)) << text << '\n';
  };
  const auto quota = [&](const std::string& groups) {
    write("groups", groups);
    return cpu_quota(temp.at("groups"), temp.at("mount"));
  };
  const double none = std::numeric_limits<double>::infinity();
  CHECK(cpu_quota(temp.at("missing"), temp.at("mount")) == none);
  CHECK(quota("0::/a/b") == none);
  write("mount/a/b/cpu.max", "max 100000");
  CHECK(quota("0::/a/b") == none);
  write("mount/a/b/cpu.max", "350000 100000");
  CHECK(quota("0::/a/b") == 3.5);
  write("mount/a/cpu.max", "200000 100000");
  CHECK(quota("0::/a/b") == 2);
  CHECK(quota("0::/a/b/c") == 2);
  write("mount/cpu.max", "50000 100000");
  CHECK(quota("0::/a/b") == 0.5);
  CHECK(quota("0::/") == 0.5);
  CHECK(quota("0::/../elsewhere") == 0.5);  // a container, whose own group is the root of the mount

  CHECK(quota("1:name=systemd:/a\n3:cpuset:/a\n4:cpu,cpuacct:/j") == none);
  write("mount/cpu/j/cpu.cfs_quota_us", "-1");
  write("mount/cpu/j/cpu.cfs_period_us", "100000");
  CHECK(quota("4:cpu,cpuacct:/j") == none);
  write("mount/cpu/j/cpu.cfs_quota_us", "150000");
  CHECK(quota("4:cpu,cpuacct:/j") == 1.5);
  CHECK(quota("4:cpuacct,cpu:/j/k\n0::/") == 0.5);
  write("mount/cpu/cpu.cfs_quota_us", "25000");
  write("mount/cpu/cpu.cfs_period_us", "100000");
  CHECK(quota("4:cpuacct,cpu:/j/k\n0::/") == 0.25);
  for (const char* damaged : {"", "0", "::", "0:", "x", "4:cpu"}) CHECK(quota(damaged) == none);
}

TEST_CASE("the cores that may be used are those of the affinity mask") {
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const double quota = cpu_quota();
  CHECK(usable_cores() == std::max(1, static_cast<int>(std::min<double>(CPU_COUNT(&allowed), quota))));
  int found = 0;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; CPU_COUNT(&one) == 0; ++core)
      if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    found = usable_cores();
  }).join();
  CHECK(found == 1);
}

}  // namespace topknot
