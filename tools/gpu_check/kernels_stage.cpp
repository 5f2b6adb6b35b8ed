// The kernels' stage: collects the figures; cuda/kernels_stage.cpp measures.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <nlohmann/json.hpp>

#include "tools/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

struct TorchTimes {
  double topk_ms, step_ms;
};

// By number of elements: torch.topk alone, and a step of top-k with error feedback in PyTorch.
std::map<double, TorchTimes> torch_times(const Options& options, double seconds, Report& report) {
  const std::string script = write_peer_script(options.out, "gpu_topk.py");
  const Outcome outcome = run({{options.python, script, "--smallest", std::to_string(options.smallest),
                                "--largest", std::to_string(options.largest), "--density", "0.001"}},
                              seconds);
  std::map<double, TorchTimes> times;
  std::string version;
  for (const std::string& line : lines_of(outcome.output)) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    try {
      times[record.at("elements")] = {record.at("topk_ms"), record.at("step_ms")};
      version = record.value("torch", "?");
    } catch (const nlohmann::json::exception&) {  // a line for people
    }
  }
  Result result{"kernels", "torch.topk", Status::passed, outcome.seconds};
  if (times.empty()) {
    result.status = Status::skipped;
    result.note = "no PyTorch figure: " + outcome.reason(options.python);
  } else {
    result.note = fmt::format("PyTorch {}, {} sizes", version, times.size());
    for (const auto& [n, ms] : times)
      result.figures.emplace_back("ms of " + size_text(static_cast<std::size_t>(n)), ms.topk_ms);
  }
  report.add(std::move(result));
  return times;
}

}  // namespace

std::vector<std::size_t> kernel_sizes(const Options& options) {
  std::vector<std::size_t> sizes;
  for (int power = options.smallest; power <= options.largest; power += 2)
    sizes.push_back(std::size_t{1} << power);
  constexpr std::size_t resnet50 = 25600000;  // about its parameters, as papers quote top-k
  if (resnet50 >> options.smallest && resnet50 >> options.largest == 0) sizes.push_back(resnet50);
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

std::string size_text(std::size_t n) {
  return std::has_single_bit(n) ? fmt::format("2^{}", std::countr_zero(n)) : "25.6M";
}

void run_kernels(const Options& options, Report& report) {
  const StageClock clock(options.seconds);
  if (!is_program(options.self)) return skip_all("kernels", options.self + " is not there", report);
  const auto torch = torch_times(options, 0.35 * clock.left(), report);
  const double seconds = clock.left();
  const Outcome outcome =
      run({{options.self, "--measure-kernels", std::to_string(0.9 * seconds), "--smallest",
            std::to_string(options.smallest), "--largest", std::to_string(options.largest)}},
          seconds);
  int results = 0;
  for (const std::string& line : lines_of(outcome.output)) {
    std::optional<Result> result = result_of(line);
    if (!result) continue;
    ++results;
    for (const auto& [n, times] : torch) {
      if (result->name != "topk, " + size_text(static_cast<std::size_t>(n)) || result->figures.empty())
        continue;
      const double ms = result->figures.front().second;
      result->figures.emplace_back("times torch.topk", times.topk_ms / ms);
      result->figures.emplace_back("times PyTorch's step", times.step_ms / ms);
    }
    report.add(std::move(*result));
  }
  Result all{"kernels", "all sizes measured", Status::passed, outcome.seconds};
  if (!outcome.ok())
    report.add(failure(std::move(all), outcome, outcome.reason(options.self)));
  else if (results == 0)
    report.add(failure(std::move(all), outcome, "no figures came: " + outcome.last_line()));
}

}  // namespace topknot::gpu_check
