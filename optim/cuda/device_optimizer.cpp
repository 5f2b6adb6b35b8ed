#include "optim/cuda/device_optimizer.h"

#include <fmt/format.h>

#include "nn/core/base/check.h"

namespace topknot::cuda {

ArenaSlices::ArenaSlices(const OptimizerOptions& options, ParameterArena& arena) : arena_(arena) {
  TOPKNOT_CHECK(arena.device() == Context::current().device(), "an optimizer for an arena on another device");
  const std::vector<DecayRange> ranges = decay_ranges(options, arena);
  first_decays_ = !ranges.empty() && ranges.front().decays;
  std::vector<std::uint64_t> boundaries;
  for (std::size_t i = 1; i < ranges.size(); ++i) boundaries.push_back(ranges[i].begin);
  boundaries_ = DeviceArray<std::uint64_t>(boundaries.size());
  if (boundaries.empty()) return;
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemcpyAsync(boundaries_.data(), boundaries.data(), boundaries_.bytes(),
                               cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

ArenaSlice ArenaSlices::slice(std::size_t offset, std::span<const float> gradient) const {
  TOPKNOT_CHECK(offset + gradient.size() <= arena_.size(), "a slice outside the arena");
  return {offset,          gradient.size(),    arena_.weights().data() + offset,
          gradient.data(), boundaries_.data(), static_cast<std::uint32_t>(boundaries_.size()),
          first_decays_};
}

void zero(const DeviceArray<float>& buffer) {
  if (buffer.size() == 0) return;
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemsetAsync(buffer.data(), 0, buffer.bytes(), stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

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
