#pragma once
// The stages of gpu-check. Each adds its results to the report, skips by name what the machine lacks, and ends
// within Options::seconds and the few seconds that killing takes.

#include <chrono>
#include <functional>
#include <string>

#include "tools/gpu_check/process.h"
#include "tools/gpu_check/report.h"
#include "train/metrics/metrics.h"

namespace topknot::gpu_check {

struct Options {
  std::string bin;  // folder of the programs
  std::string out;  // of the report and of what the stages write
  std::string python = "python3";
  std::string sanitizer = "compute-sanitizer";
  std::string self;                 // gpu-check itself, which the kernels' stage starts
  double seconds = 165;             // of one stage
  int smallest = 16, largest = 30;  // kernels: powers of two of elements
};

// The time that a stage has left.
class StageClock {
 public:
  explicit StageClock(double seconds) : begin_(std::chrono::steady_clock::now()), seconds_(seconds) {}
  double spent() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  double left() const { return seconds_ - spent(); }
  // Too little to begin anything.
  bool used_up() const { return left() < 0.03 * seconds_; }

 private:
  std::chrono::steady_clock::time_point begin_;
  double seconds_;
};
inline const char* const kUsedUp = "the stage's time is used up";

// gpu_tests: every op and compressor against the CPU; the same again under compute-sanitizer.
void run_tests(const Options& options, Report& report);
// NCCL with 1 rank, then 2 and 4 processes on the one GPU, each a host of its own by NCCL_HOSTID: every
// collective exact, and the same training as with threads.
void run_nccl(const Options& options, Report& report);
// Bytes per second of each selection against a device copy in the same run, and torch.topk. The figures come from
// gpu-check itself as another process, which a lost GPU may take with it.
void run_kernels(const Options& options, Report& report);
// Images per second of ResNet-20, VGG-16 and ResNet-50 shapes against PyTorch at its best.
void run_train(const Options& options, Report& report);

// Elements that the kernels are measured with: powers of two in the options' range, and 25.6 million.
std::vector<std::size_t> kernel_sizes(const Options& options);
std::string size_text(std::size_t n);  // "2^24", "25.6M"

// The work of that other process, in options.seconds: `report` gets each result as soon as it is there. Throws where
// the GPU is lost.
void measure_kernels(const Options& options, const std::function<void(const Result&)>& report);

// Card, driver, libraries; into the report's heading.
void describe_gpu(Report& report);
// The checks of a stage that is not run, as skipped for one reason.
void skip_all(const std::string& stage, const std::string& reason, Report& report);

// The result as a failure, with the end of the output of the program.
Result failure(Result result, const Outcome& outcome, const std::string& note);

// The folder of a run of `train` in `out`, with no run of an earlier check in it.
std::string fresh_run_directory(const std::string& out, const std::string& name);
// The last record of its metrics; without a checksum and times where the run did not come to its end.
EndRecord end_of_run(const std::string& folder);

// Writes scripts/peers/NAME into the folder and returns its path: gpu-check carries the PyTorch peers with it, so
// that it needs no folder of scripts.
std::string write_peer_script(const std::string& folder, const std::string& name);

}  // namespace topknot::gpu_check
