// CUDA counterpart of optim/sgd.cpp.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "optim/cuda/device_optimizer.h"
#include "optim/cuda/sgd_kernels.h"

namespace topknot::cuda {
namespace {

class DeviceSgd final : public DeviceOptimizer {
 public:
  DeviceSgd(const OptimizerOptions& options, ParameterArena& arena)
      : options_(options), slices_(options, arena), momentum_(options.momentum > 0 ? arena.size() : 0) {
    zero(momentum_);
  }

  void update(cudaStream_t stream, std::size_t offset, std::span<const float> gradient,
              const StepParameters* parameters, const StepStatus* status, GradientForm form) override {
    TOPKNOT_CHECK(form != GradientForm::has_lr || options_.momentum == 0,
                  "a gradient that has the learning rate in it cannot take momentum");
    sgd_update(stream, sgd_rule(options_.momentum > 0, options_.nesterov, form),
               slices_.slice(offset, gradient), momentum_.size() > 0 ? momentum_.data() + offset : nullptr,
               static_cast<float>(options_.momentum), static_cast<float>(options_.weight_decay), parameters,
               status);
  }

  std::vector<std::span<float>> state() override {
    if (momentum_.size() == 0) return {};
    return {{momentum_.data(), momentum_.size()}};
  }

 private:
  OptimizerOptions options_;
  ArenaSlices slices_;
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
