#include "nn/core/device.h"

#include <fmt/format.h>

#include "nn/base/check.h"

namespace topknot {

std::string Device::str() const {
  return kind == DeviceKind::cpu ? "cpu" : fmt::format("cuda:{}", index);
}

const DeviceBackend& backend(Device device) {
  return device.kind == DeviceKind::cpu ? cpu_backend() : cuda_backend();
}

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "auto") return cuda_available() ? Device{DeviceKind::cuda, 0} : Device{};
  if (name == "cuda") {
    if (const std::string problem = cuda_problem(); !problem.empty())
      throw UserError("train.device=cuda: " + problem + ", or set train.device=cpu (or auto)");
    return {DeviceKind::cuda, 0};
  }
  throw UserError("unknown device '" + name + "'; known: auto, cpu, cuda");
}

}  // namespace topknot
