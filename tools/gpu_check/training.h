#pragma once
// Runs of `train` that gpu-check starts, and what their metrics say at the end.

#include <string>

namespace topknot::gpu_check {

struct RunEnd {
  std::string checksum;  // of the weights; "" where the run did not come to its end
  double step_s = 0;     // the median of its steps after the first ones
};

// The folder's name in `out`, with no run of an earlier check in it.
std::string fresh_run_directory(const std::string& out, const std::string& name);
RunEnd end_of_run(const std::string& folder);

}  // namespace topknot::gpu_check
