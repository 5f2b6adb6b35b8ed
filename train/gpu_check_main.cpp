// gpu-check: proves the CUDA backend on the GPU of this machine, with programs that are built already. Exit codes:
// 0 all that ran passed, 1 something failed, 2 bad arguments, 3 no GPU: everything was skipped.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <map>

#include "nn/core/check.h"
#include "nn/core/device.h"
#include "nn/core/log.h"
#include "train/gpu_check/stages.h"

using namespace topknot;
using namespace topknot::gpu_check;

namespace {

constexpr int kNoGpu = 3;

std::string own_folder() {
  char path[PATH_MAX] = {};
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  return length > 0 ? std::filesystem::path(path).parent_path().string() : ".";
}

using Stage = void (*)(const Options&, Report&);
const std::vector<std::pair<std::string, Stage>>& all_stages() {
  static const std::vector<std::pair<std::string, Stage>> all{
      {"tests", run_tests}, {"nccl", run_nccl}, {"kernels", run_kernels}, {"train", run_train}};
  return all;
}

int run(int argc, char** argv) {
  CLI::App app{
      "Checks the CUDA backend on this machine's GPU, stage by stage, each under three minutes. The results "
      "stand in\n"
      "OUT/gpu-check.json and OUT/gpu-check.txt as each stage ends.\n\n"
      "  tests    every op and compressor against the CPU, and under compute-sanitizer\n"
      "  nccl     collectives and training with 1, 2 and 4 processes on the one GPU\n"
      "  kernels  bytes a second of the selections against a device copy and torch.topk\n"
      "  train    images a second against PyTorch\n\n"
      "Exit codes: 0 all that ran passed, 1 something failed, 2 bad arguments, 3 no GPU (all skipped)."};
  Options options;
  options.bin = own_folder();
  options.out = "gpu-check";
  std::vector<std::string> stages;
  std::vector<std::string> names;
  for (const auto& [name, stage] : all_stages()) names.push_back(name);
  app.add_option("--stage", stages, "only this stage; may be given several times")
      ->check(CLI::IsMember(names));
  app.add_option("--bin", options.bin, "folder of the programs (default: this program's own)");
  app.add_option("--out", options.out, "folder of the results (default: gpu-check)");
  app.add_option("--python", options.python, "Python that has PyTorch, for comparison (default: python3)");
  app.add_option("--smallest", options.smallest, "kernels: least number of elements, a power of two")
      ->check(CLI::Range(10, 30));
  app.add_option("--largest", options.largest, "kernels: greatest number of elements, a power of two")
      ->check(CLI::Range(10, 30));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (options.smallest > options.largest) throw UserError("--smallest is above --largest; exchange them");

  Report report(options.out);
  const std::string problem = cuda_problem();
  if (problem.empty())
    describe_gpu(report);
  else
    std::printf("gpu-check: %s\n", problem.c_str());
  for (const auto& [name, stage] : all_stages()) {
    if (!stages.empty() && std::find(stages.begin(), stages.end(), name) == stages.end()) continue;
    if (!problem.empty()) {
      skip_all(name, problem, report);
    } else {
      try {
        stage(options, report);
      } catch (const std::exception& error) {
        report.add({name, "the stage", Status::failed, 0, {}, error.what()});
      }
    }
    report.write();
  }
  std::printf("%s/gpu-check.txt and .json have the results\n", options.out.c_str());
  if (!problem.empty()) return kNoGpu;
  return report.any(Status::failed) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const UserError& error) {
    log_error(error.what());
    return 2;
  } catch (const std::exception& error) {
    log_error(error.what());
    return 1;
  }
}
