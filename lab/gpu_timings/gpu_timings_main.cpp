// gpu_timings: what scripts/gpu-check knows of this machine's GPU, as JSON, one object a line.
//
//   gpu_timings --describe                                 {"about": {...}} or {"problem": why no GPU can be used}
//   gpu_timings [--seconds S] [--smallest N] [--largest N]  {"what", "elements", "figures", "skipped"} of 2^N elements
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "lab/gpu_timings/gpu_timings.h"
#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/core/device.h"

using namespace topknot;
using namespace topknot::gpu_timings;
using Json = nlohmann::ordered_json;

namespace {

void print_line(const Json& json) {
  std::puts(json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}

Json object_of(const auto& pairs) {
  Json object = Json::object();
  for (const auto& [name, value] : pairs) object[name] = value;
  return object;
}

int run(int argc, char** argv) {
  CLI::App app{"Times the selections on this machine's GPU, for scripts/gpu-check", "gpu_timings"};
  Options options;
  bool describe = false;
  app.add_flag("--describe", describe, "only the card, the driver and the libraries, or why there is no GPU");
  app.add_option("--seconds", options.seconds, "end about then")->capture_default_str();
  app.add_option("--smallest", options.smallest, "from 2^N elements")->capture_default_str();
  app.add_option("--largest", options.largest, "to 2^N elements")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UserError(std::string(error.what()) + "; gpu_timings --help lists the options");
  }
  if (!describe) {
    measure(options, [](const Timing& timing) {
      print_line({{"what", timing.what},
                  {"elements", timing.elements},
                  {"figures", object_of(timing.figures)},
                  {"skipped", timing.skipped}});
    });
    return 0;
  }
  if (const std::string problem = cuda_problem(); !problem.empty())
    print_line({{"problem", problem}});
  else
    print_line({{"about", object_of(describe_gpu())}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("gpu_timings", run, argc, argv);
}
