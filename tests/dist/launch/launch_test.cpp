#include "dist/launch/launch.h"

#include <sys/mman.h>

#include <map>

#include "dist/comm/communicator.h"
#include "dist/rendezvous/socket.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/text.h"

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
  try {
    plan_launch(options, from(variables));
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
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
  auto plan = plan_launch(options, from({}));
  CHECK(plan.kind == LaunchPlan::Kind::threads);
  CHECK(plan.size == 1);
  options.ranks = 4;
  plan = plan_launch(options, from({}));
  CHECK(plan.kind == LaunchPlan::Kind::threads);
  CHECK(plan.size == 4);

  plan = plan_launch(gloo(4), from({}));
  CHECK(plan.kind == LaunchPlan::Kind::spawn);
  CHECK(plan.size == 4);
  CHECK(plan.host == "127.0.0.1");
  CHECK(plan.port == 0);
  CHECK(plan_launch(gloo(4, "127.0.0.1:4711"), from({})).port == 4711);

  plan = plan_launch(gloo(), from({}));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.size == 1);
}

TEST_CASE("torchrun gives rank, size and master, one port above its own") {
  const auto plan = plan_launch(gloo(), from(torchrun));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.launcher == "torchrun");
  CHECK(plan.rank == 5);
  CHECK(plan.size == 8);
  CHECK(plan.local_rank == 1);
  CHECK(plan.host == "node0");
  CHECK(plan.port == 29501);
  const auto given = plan_launch(gloo(8, "node9:1234"), from(torchrun));
  CHECK(given.host == "node9");
  CHECK(given.port == 1234);
}

TEST_CASE("mpirun, srun and PMI give rank and size, dist.master the rendezvous") {
  auto plan = plan_launch(gloo({}, "node0:29500"), from(mpirun));
  CHECK(plan.launcher == "mpirun");
  CHECK(plan.rank == 3);
  CHECK(plan.size == 4);
  CHECK(plan.local_rank == 1);
  CHECK(plan.host == "node0");
  CHECK(plan.port == 29500);
  plan = plan_launch(gloo({}, "[fe80::1]:29500"), from(srun));
  CHECK(plan.launcher == "srun");
  CHECK(plan.rank == 2);
  CHECK(plan.size == 4);
  CHECK(plan.host == "fe80::1");
  plan = plan_launch(gloo({}, "node0:29500"), from({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}));
  CHECK(plan.launcher == "PMI");
  CHECK(plan.rank == 1);
  CHECK(plan.size == 2);
  for (const char* address : {"::1", "[::1]"})
    CHECK(plan_launch(gloo(), from(both(srun, {{"MASTER_ADDR", address}, {"MASTER_PORT", "29500"}}))).host ==
          "::1");
  plan = plan_launch(gloo(), from(both(srun, {{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}})));
  CHECK(plan.host == "node0");
  CHECK(plan.port == 29501);
}

TEST_CASE("mpirun and srun without a master are an error that names dist.master") {
  for (const auto& [name, variables] :
       {std::pair<std::string, Variables>{"mpirun", mpirun}, {"srun", srun}}) {
    const auto error = error_of(gloo(), variables);
    INFO(error);
    CHECK(contains(error, name));
    CHECK(contains(error, "dist.master=HOST:PORT"));
  }
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
  const auto error = error_of(gloo({}, "node0:29500"), both(torchrun, mpirun));
  INFO(error);
  CHECK(contains(error, "torchrun says rank 5 of 8"));
  CHECK(contains(error, "mpirun says rank 3 of 4"));
  CHECK(plan_launch(gloo(), from(both(torchrun, srun))).launcher == "torchrun");
  CHECK(plan_launch(gloo({}, "node0:29500"), from(both(mpirun, srun))).launcher == "mpirun");
}

TEST_CASE("srun's step counts its tasks, not the allocation's") {
  const auto plan = plan_launch(gloo({}, "node0:29500"), from(srun));
  CHECK(plan.size == 4);
  CHECK(plan.rank == 2);
}

TEST_CASE("a batch script and a shell of srun start the ranks that they ask for") {
  for (const Variables& variables : {batch_script, both({{"SLURM_STEP_NUM_TASKS", "1"}}, batch_script),
                                     both({{"SLURM_NTASKS", "1"}}, batch_script)}) {
    auto options = gloo(4);
    options.ranks_insist = true;
    const auto plan = plan_launch(options, from(variables));
    CHECK(plan.kind == LaunchPlan::Kind::spawn);
    CHECK(plan.size == 4);
  }
}

TEST_CASE(
    "dist.ranks that contradicts the launcher is an error where this run was given it, else the "
    "launcher's number counts") {
  auto given = gloo(4);
  CHECK(plan_launch(given, from(torchrun)).size == 8);
  given.ranks_insist = true;
  const auto error = error_of(given, torchrun);
  INFO(error);
  CHECK(contains(error, "dist.ranks is 4"));
  CHECK(contains(error, "torchrun started 8"));
  given.ranks = 8;
  CHECK(error_of(given, torchrun).empty());
}

TEST_CASE("threads under a launcher of several processes is an error, a batch script is not") {
  CHECK(contains(error_of(DistOptions{}, torchrun), "dist.backend=gloo"));
  CHECK(contains(error_of(DistOptions{}, srun), "dist.backend=gloo"));
  CHECK(error_of(DistOptions{}, batch_script).empty());
}

TEST_CASE("auto is threads by itself and in a batch script, and a process under a launcher of several") {
  DistOptions options;
  options.backend = "auto";
  options.ranks = 4;
  for (const Variables& variables :
       {Variables{}, batch_script, Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
        Variables{{"TOPKNOT_RANK", "2"}, {"TOPKNOT_RANKS", "4"}, {"TOPKNOT_MASTER", "127.0.0.1:4711"}}}) {
    const auto plan = plan_launch(options, from(variables));
    CHECK(plan.kind == LaunchPlan::Kind::threads);
    CHECK(plan.size == 4);
  }
  const auto plan = plan_launch(options, from(torchrun));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.rank == 5);
  CHECK(plan.size == 8);
  options.master = "node0:29500";
  CHECK(plan_launch(options, from(mpirun)).launcher == "mpirun");
  CHECK(plan_launch(options, from(srun)).launcher == "srun");
}

TEST_CASE("auto takes nccl where every rank has a GPU of its own, else gloo, on every rank the same") {
  const auto choice = [](std::vector<std::string> problems, std::vector<std::string> places) {
    std::vector<BackendChoice> choices(3);
    run_ranks("threads", 3, [&](Communicator& host) {
      const auto r = static_cast<std::size_t>(host.rank());
      choices[r] = choose_backend(host, problems[r], places[r]);
    });
    for (const BackendChoice& each : choices) CHECK(each.reason == choices[0].reason);
    for (const BackendChoice& each : choices) CHECK(each.backend == choices[0].backend);
    return choices[0];
  };
  CHECK(choice({"", "", ""}, {"a 0", "a 1", "b 0"}).backend == "nccl");
  const auto none = choice({"", "no GPU", ""}, {"a 0", "", "b 0"});
  CHECK(none.backend == "gloo");
  CHECK(none.reason == "rank 1: no GPU");
  const auto shared = choice({"", "", ""}, {"a 0", "b 0", "a 0"});
  CHECK(shared.backend == "gloo");
  CHECK(shared.reason == "ranks 0 and 2 have the same GPU");
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
    CHECK(contains(error, "dist.master"));
    CHECK(contains(error, "HOST:PORT"));
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
  CHECK(contains(error_of(options, {}), "dist.token has 300 bytes"));
}

TEST_CASE("variables of a copy that were left over or set by hand make no copy") {
  Fd proof = new_proof();
  const Variables variables = copy_of(proof);
  CHECK(plan_launch(gloo(4), from(variables)).rank == 2);
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

TEST_CASE("a copy that was started finds its place, whatever dist.ranks says") {
  const Fd proof = new_proof();
  const auto plan = plan_launch(gloo(4), from(copy_of(proof)));
  CHECK(plan.kind == LaunchPlan::Kind::process);
  CHECK(plan.launcher == "spawn");
  CHECK(plan.rank == 2);
  CHECK(plan.size == 4);
  CHECK(plan.port == 4711);
}

}  // namespace topknot
