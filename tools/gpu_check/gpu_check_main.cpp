// gpu-check: proves the CUDA backend on the GPU of this machine, with programs that are built already. Exit codes:
// 0 all that ran passed, 1 something failed, 2 bad arguments, 3 nothing could be checked (no GPU, or none of the
// programs), 128 + signal where a signal stopped it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/base/terminal.h"
#include "nn/core/device.h"
#include "tools/gpu_check/stages.h"

using namespace topknot;
using namespace topknot::gpu_check;

namespace {

constexpr int kNothingChecked = 3;

std::string own_path() {
  char path[PATH_MAX] = {};
  return readlink("/proc/self/exe", path, sizeof path - 1) > 0 ? path : "./gpu-check";
}

using Stage = void (*)(const Options&, Report&);
const std::vector<std::pair<std::string, Stage>>& all_stages() {
  static const std::vector<std::pair<std::string, Stage>> all{
      {"tests", run_tests}, {"nccl", run_nccl}, {"kernels", run_kernels}, {"train", run_train}};
  return all;
}

struct Arguments {
  Options options;
  std::vector<std::string> stages;  // empty: all
  double measure_kernels = 0;  // seconds of the process that the kernels' stage starts; 0: not that process
};

void add_options(CLI::App& app, Arguments& arguments) {
  Options& options = arguments.options;
  std::vector<std::string> names;
  for (const auto& [name, stage] : all_stages()) names.push_back(name);
  app.add_option("--stage", arguments.stages,
                 "only this stage: tests, nccl, kernels or train; may be repeated")
      ->check(CLI::IsMember(names).description(""))
      ->type_name("STAGE")
      ->expected(1)
      ->take_all();
  app.add_option("--bin", options.bin, "folder of train and gpu_tests (default: this program's own)")
      ->type_name("DIR");
  app.add_option("--out", options.out, "folder of the results (default: gpu-check)")->type_name("DIR");
  app.add_option("--python", options.python, "Python that has PyTorch, for comparison (default: python3)")
      ->type_name("PROGRAM");
  app.add_option("--smallest", options.smallest, "kernels: from 2^N elements (default: 16)")
      ->check(CLI::Range(10, 30).description(""))
      ->type_name("N");
  app.add_option("--largest", options.largest, "kernels: to 2^N elements (default: 30)")
      ->check(CLI::Range(10, 30).description(""))
      ->type_name("N");
  app.add_option("--measure-kernels", arguments.measure_kernels)->group("");
}

int check(const Arguments& arguments) {
  const Options& options = arguments.options;
  std::error_code ignored;
  if (!std::filesystem::is_directory(options.bin, ignored))
    throw UserError("--bin: " + options.bin + " is no folder; name the one with train and gpu_tests");
  Report report(options.out);
  install_stop_handlers();
  const std::string problem = cuda_problem();
  if (problem.empty())
    describe_gpu(report);
  else
    std::printf("gpu-check: %s\n", problem.c_str());
  bool interrupted = false;
  for (const auto& [name, stage] : all_stages()) {
    if (!arguments.stages.empty() &&
        std::find(arguments.stages.begin(), arguments.stages.end(), name) == arguments.stages.end())
      continue;
    if (!problem.empty() || interrupted) {
      skip_all(name, interrupted ? "stopped by a signal" : problem, report);
      continue;
    }
    try {
      stage(options, report);
    } catch (const Interrupted& error) {
      interrupted = true;
      report.add({name, "the rest of the stage", Status::skipped, 0, {}, error.what()});
    } catch (const std::exception& error) {
      report.add({name, "the stage", Status::failed, 0, {}, error.what()});
    }
  }
  std::printf("%s/gpu-check.txt and .json have the results\n", options.out.c_str());
  if (interrupted) return 128 + stop_signal();
  if (report.any(Status::failed)) return 1;
  return report.any(Status::passed) ? 0 : kNothingChecked;
}

int run(int argc, char** argv) {
  CLI::App app{
      "Checks the CUDA backend on this machine's GPU, stage by stage, each under three minutes. It starts "
      "programs\n"
      "that are built already and needs nothing else but CUDA's libraries; what the machine lacks is skipped "
      "by\n"
      "name. The results stand in OUT/gpu-check.txt and OUT/gpu-check.json, written anew with each one.\n\n"
      "  tests    every op and compressor against the CPU, and under compute-sanitizer\n"
      "  nccl     collectives and training with 1, 2 and 4 processes on the one GPU\n"
      "  kernels  bytes per second of the selections against a device copy and torch.topk\n"
      "  train    images per second against PyTorch\n",
      "gpu-check"};
  app.footer(
      "Exit codes: 0 all that ran passed, 1 something failed, 2 bad arguments, 3 nothing could be checked "
      "(no GPU,\n"
      "or none of the programs), 128 + signal where a signal stopped it.\n\n"
      "  gpu-check --out results             everything\n"
      "  gpu-check --stage nccl --out nccl   one stage");
  Arguments arguments;
  Options& options = arguments.options;
  options.self = own_path();
  options.bin = std::filesystem::path(options.self).parent_path().string();
  options.out = "gpu-check";
  add_options(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(reflowed(app.help(), terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UserError(std::string(error.what()) + "; gpu-check --help lists the options");
  }
  if (options.smallest > options.largest) throw UserError("--smallest is above --largest; exchange them");
  if (arguments.measure_kernels > 0) {
    options.seconds = arguments.measure_kernels;
    measure_kernels(options, [](const Result& result) {
      std::puts(json_line(result).c_str());
      std::fflush(stdout);
    });
    return 0;
  }
  return check(arguments);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(nullptr, run, argc, argv);
}
