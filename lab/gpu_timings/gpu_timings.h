#pragma once
// The measurements of the program gpu_timings, for scripts/gpu-check.

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace topknot::gpu_timings {

struct Options {
  double seconds = 150;
  int smallest = 16, largest = 30;  // powers of two of elements
};

struct Timing {
  std::string what;  // "device copy", "topk"
  std::size_t elements = 0;
  std::vector<std::pair<std::string, double>> figures = {};  // "ms", "GB/s", in this order
  std::string skipped = {};                                  // why there are no figures
};
inline const char* const kUsedUp = "the stage's time is used up";

// Elements to measure with: powers of two in the options' range, and 25.6 million.
std::vector<std::size_t> sizes_of(const Options& options);

// Time and bytes per second of each selection on the GPU against a device copy: `report` gets each as soon as
// it is there. Throws if the GPU is lost.
void measure(const Options& options, const std::function<void(const Timing&)>& report);

// Card, driver and libraries: "card", "NVIDIA H200".
std::vector<std::pair<std::string, std::string>> describe_gpu();

}  // namespace topknot::gpu_timings
