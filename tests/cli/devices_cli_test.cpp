// What a user is told of this machine's devices and network: gpu-check (its stages are tested over fakes by
// lab/tests/gpu_check.py), train.device, dist.backend=nccl, train --check-network.

#include "tests/cli/command.h"
#include "tests/support/free_port.h"

using namespace topknot;

namespace {

// Without a GPU, also where there is one.
CommandOutcome gpu_check(const std::string& arguments, const std::string& before = "") {
  return run_command(before + "CUDA_VISIBLE_DEVICES= " + TOPKNOT_BIN "/gpu-check " + arguments);
}

CommandOutcome train_without_gpu(const std::string& arguments) {
  return run_command(
      "CUDA_VISIBLE_DEVICES= " TOPKNOT_BIN
      "/train dist.backend=threads model.name=mlp data.train_size=64 data.test_size=16 train.max_steps=1 " +
      arguments);
}

// One line, which begins so, and exit code 2.
void check_one_error(const CommandOutcome& outcome, const std::string& begin) {
  CHECK(outcome.ended(2));
  CHECK(outcome.output.starts_with("error: " + begin));
  CHECK(outcome.count("\n") == 1);
}

}  // namespace

TEST_CASE("gpu-check without a GPU says so, writes a table of skips and exits with 3, from any folder") {
  const TempFolder temp;
  const CommandOutcome check = gpu_check("", "cd " + temp.str() + " && ");
  CHECK(check.ended(3));
  CHECK(check.count("gpu-check: ") == 1);
  CHECK_FALSE(check.has("passed"));
  std::ifstream file(temp.at("gpu-check/gpu-check.json"));
  const auto json = nlohmann::json::parse(file);
  std::vector<std::string> stages;
  for (const auto& result : json["results"]) {
    CHECK(result["result"] == "skipped");
    CHECK_FALSE(result["note"].get<std::string>().empty());
    if (stages.empty() || stages.back() != result["stage"]) stages.push_back(result["stage"]);
  }
  CHECK(stages == std::vector<std::string>{"smoke", "tests", "nccl", "kernels", "train"});
  CHECK(std::filesystem::exists(temp.at("gpu-check/gpu-check.txt")));
}

TEST_CASE("gpu-check does the stages that were asked for") {
  const TempFolder temp;
  check_outcome(gpu_check("--stage nccl --stage train --out " + temp.at("out")), 3,
                {"nccl     skipped", "train    skipped"}, {"kernels"});
}

TEST_CASE("gpu-check --help names the stages, the files and the exit codes") {
  check_help([](const std::string& arguments) { return gpu_check(arguments); },
             {"smoke ", "tests ", "nccl ", "kernels ", "train ", "--stage", "--bin", "--out", "--python",
              "gpu-check.json", "Exit codes"},
             false);
}

TEST_CASE("gpu-check validates its arguments: one line each and exit code 2") {
  const TempFolder temp;
  for (const std::string& wrong : {std::string("--stage speed"), std::string("--bogus"), std::string("stray"),
                                   std::string("--smallest 40"), std::string("--smallest 20 --largest 18"),
                                   "--bin " + temp.at("nothing"), std::string("--out /proc/no")}) {
    const CommandOutcome check = gpu_check(wrong);
    INFO(wrong);
    check_one_error(check, "");
  }
}

TEST_CASE("train.device=cuda without a GPU is one clear error before there is a run directory") {
  const TempFolder temp;
  const std::string folder = temp.at("run");
  for (const std::string how :
       {"", "--validate", "dist.ranks=2", "dist.ranks=2 dist.backend=gloo", "dist.ranks=2 --validate"}) {
    const CommandOutcome run = train_without_gpu("train.device=cuda output.dir=" + folder + " " + how);
    INFO(how);
    check_one_error(run, "train.device=cuda: ");
    CHECK(run.has("train.device=cpu"));
    CHECK_FALSE(std::filesystem::exists(folder));
  }
}

TEST_CASE("dist.backend=nccl without a GPU is one clear error, whatever the device") {
  const TempFolder temp;
  for (const std::string how : {"train.device=auto", "train.device=auto --validate", "train.device=cuda"}) {
    const CommandOutcome run =
        train_without_gpu("dist.backend=nccl dist.ranks=2 output.dir=" + temp.at("run") + " " + how);
    INFO(how);
    check_one_error(run, "dist.backend: nccl needs one GPU per rank");
    CHECK_FALSE(std::filesystem::exists(temp.at("run")));
  }
}

TEST_CASE("train.device=auto falls back to the CPU with one line, where the build could use a GPU") {
  const TempFolder temp;
  for (const std::string how : {"", "dist.ranks=2", "dist.ranks=2 dist.backend=gloo"}) {
    const std::string folder = "output.overwrite=true output.dir=" + temp.at("run") + " ";
    const CommandOutcome run = train_without_gpu("train.device=auto " + folder + how);
    INFO(how);
    CHECK(run.ended(0));
    CHECK(run.count("train.device: auto takes the CPU: no GPU was found") == TOPKNOT_PROGRAMS_HAVE_CUDA);
    CHECK_FALSE(train_without_gpu("train.device=cpu " + folder + how).has("train.device"));
    CHECK_FALSE(train_without_gpu("train.device=auto --quiet " + folder + how).has("train.device"));
  }
}

TEST_CASE("nccl is refused clearly on the CPU, and where messages would have no fixed length") {
  check_outcome(train("dist.backend=nccl train.device=cpu compress.name=gaussiank"), 2,
                {"train.device: dist.backend=nccl", "compress.capacity: must be given"});
  CHECK_FALSE(train("dist.backend=nccl train.device=cpu compress.name=topk").has("compress.capacity"));
}

TEST_CASE("train --check-network has threads and processes talk, and shows ranks, collectives and sizes") {
  for (const std::string backend : {"threads", "gloo"}) {
    const CommandOutcome check = train(
        "--check-network train.device=cpu dist.ranks=3 model.name=mlp data.train_size=64 data.test_size=8 "
        "dist.backend=" +
        backend);
    check_outcome(check, 0, {"3 ranks, dist.backend " + backend});
    for (const char* rank : {"\n    0  ", "\n    1  ", "\n    2  "}) CHECK(check.count(rank) == 1);
    CHECK(check.count("host, " + backend) == 6);
    CHECK(says(check.output, {"16777216", "every value arrived as it should",
                              "\ncompress.name=auto"}));  // its figures vary
  }
}

TEST_CASE("train --check-network recommends no method without the run's data") {
  check_outcome(train("--check-network train.device=cpu dist.ranks=2 data.name=cifar10 data.root=/"), 0,
                {"every value arrived as it should", "\nno method is recommended: "});
}

TEST_CASE("train --check-network says which rank did not come, and ends") {
  const std::string port = std::to_string(free_port() - 1);  // the ranks meet one above MASTER_PORT
  const CommandOutcome check =
      run_command("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port + " " +
                  TOPKNOT_BIN "/train --check-network dist.backend=gloo dist.timeout_s=1");
  CHECK(check.ended(1));
  CHECK(check.count("error: ") == 1);
  CHECK(check.has("rank 1 did not come to 127.0.0.1"));
}
