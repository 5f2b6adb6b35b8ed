#pragma once
// The stages of gpu-check. Each adds its results to the report, skips by name what the machine lacks, and ends
// within about three minutes.

#include <string>

#include "train/gpu_check/report.h"

namespace topknot::gpu_check {

struct Options {
  std::string bin;  // folder of the programs
  std::string out;  // of the report and of what the stages write
  std::string python = "python3";
  double seconds = 170;             // of one stage
  int smallest = 16, largest = 30;  // kernels: powers of two of elements
};

// gpu_tests: every op and compressor against the CPU; the same again under compute-sanitizer.
void run_tests(const Options& options, Report& report);
// NCCL with 1 rank, then 2 and 4 processes on the one GPU, each a host of its own by NCCL_HOSTID: every
// collective exact, and the same training as with threads.
void run_nccl(const Options& options, Report& report);
// Bytes a second of each selection against a device copy in the same run, and torch.topk.
void run_kernels(const Options& options, Report& report);
// Images a second of ResNet-20, VGG-16 and ResNet-50 shapes against PyTorch at its best.
void run_train(const Options& options, Report& report);

// Card, driver, libraries; into the report's heading.
void describe_gpu(Report& report);
// What the stages would have done, as skips for one reason.
void skip_all(const std::string& stage, const std::string& reason, Report& report);

}  // namespace topknot::gpu_check
