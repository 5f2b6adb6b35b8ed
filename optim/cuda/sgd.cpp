// CUDA counterpart of optim/sgd.cpp.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "optim/cuda/device_optimizer.h"
#include "optim/cuda/sgd_kernels.h"

namespace topknot::cuda {
namespace {

class DeviceSgd final : public DeviceOptimizer {
 public:
  DeviceSgd(const OptimizerOptions& options, ParameterArena& arena) : options_(options), arena_(arena) {
    TOPKNOT_CHECK(arena.device() == Context::current().device(),
                  "an optimizer for an arena on another device");
    const std::vector<DecayRange> ranges = decay_ranges(options, arena);
    first_decays_ = !ranges.empty() && ranges.front().decays;
    std::vector<std::uint64_t> boundaries;
    for (std::size_t i = 1; i < ranges.size(); ++i) boundaries.push_back(ranges[i].begin);
    boundaries_ = DeviceArray<std::uint64_t>(boundaries.size());
    const cudaStream_t stream = Context::current().stream();
    if (!boundaries.empty())
      TOPKNOT_CUDA(cudaMemcpyAsync(boundaries_.data(), boundaries.data(), boundaries_.bytes(),
                                   cudaMemcpyHostToDevice, stream));
    if (options.momentum > 0) {
      momentum_ = DeviceArray<float>(arena.size());
      TOPKNOT_CUDA(cudaMemsetAsync(momentum_.data(), 0, momentum_.bytes(), stream));
    }
    TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }

  void update(cudaStream_t stream, std::size_t offset, std::span<const float> gradient,
              const StepParameters* parameters, const StepStatus* status, GradientForm form) override {
    TOPKNOT_CHECK(offset + gradient.size() <= arena_.size(), "a slice outside the arena");
    TOPKNOT_CHECK(form != GradientForm::has_lr || options_.momentum == 0,
                  "a gradient that has the learning rate in it cannot take momentum");
    const SgdSlice slice{offset,
                         gradient.size(),
                         arena_.weights().data() + offset,
                         gradient.data(),
                         momentum_.size() > 0 ? momentum_.data() + offset : nullptr,
                         boundaries_.data(),
                         static_cast<std::uint32_t>(boundaries_.size()),
                         first_decays_};
    sgd_update(stream, sgd_rule(options_.momentum > 0, options_.nesterov, form), slice,
               static_cast<float>(options_.momentum), static_cast<float>(options_.weight_decay), parameters,
               status);
  }

  std::vector<std::span<float>> state() override {
    if (momentum_.size() == 0) return {};
    return {{momentum_.data(), momentum_.size()}};
  }

 private:
  OptimizerOptions options_;
  ParameterArena& arena_;
  DeviceArray<std::uint64_t> boundaries_;  // between ranges that decay and ranges that do not
  bool first_decays_ = false;
  DeviceArray<float> momentum_;
};

const bool sgd_registered =
    (device_optimizers().add("sgd", "the rules of optim/sgd.cpp",
                             [](const OptimizerOptions& options, ParameterArena& arena) {
                               return std::unique_ptr<DeviceOptimizer>(new DeviceSgd(options, arena));
                             }),
     true);

}  // namespace
}  // namespace topknot::cuda
