#include "optim/cuda/device_optimizer.h"

#include <fmt/format.h>

namespace topknot::cuda {

Registry<DeviceOptimizerFactory>& device_optimizers() {
  static Registry<DeviceOptimizerFactory> registry("optimizer with kernels for a GPU");
  return registry;
}

std::unique_ptr<DeviceOptimizer> make_device_optimizer(const OptimizerOptions& options,
                                                       ParameterArena& arena) {
  check_optimizer(options);
  if (!device_optimizers().contains(options.name)) {
    std::string others;
    for (const std::string& name : device_optimizers().names()) others += name + ", ";
    throw UserError(fmt::format("optimizer.name: '{}' has no kernels for a GPU; give {}or train.device=cpu",
                                options.name, others));
  }
  return device_optimizers().find(options.name)(options, arena);
}

}  // namespace topknot::cuda
