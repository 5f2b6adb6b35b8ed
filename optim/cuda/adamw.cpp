// CUDA counterpart of optim/adamw.cpp.
#include "nn/core/base/check.h"
#include "optim/cuda/adamw_kernels.h"
#include "optim/cuda/device_optimizer.h"

namespace topknot::cuda {
namespace {

class DeviceAdamW final : public DeviceOptimizer {
 public:
  DeviceAdamW(const OptimizerOptions& options, ParameterArena& arena)
      : constants_{options.beta1, options.beta2, options.epsilon, options.weight_decay},
        slices_(options, arena),
        first_(arena.size()),
        second_(arena.size()) {
    zero(first_), zero(second_);
  }

  void update(cudaStream_t stream, std::size_t offset, std::span<const float> gradient,
              const StepParameters* parameters, const StepStatus* status, GradientForm form) override {
    TOPKNOT_CHECK(form == GradientForm::plain,
                  "adamw takes gradients without momentum and learning rate in them");
    adamw_update(stream, slices_.slice(offset, gradient), first_.data() + offset, second_.data() + offset,
                 constants_, parameters, status);
  }

  std::vector<std::span<float>> state() override {
    return {{first_.data(), first_.size()}, {second_.data(), second_.size()}};
  }

 private:
  const AdamwConstants constants_;
  ArenaSlices slices_;
  DeviceArray<float> first_, second_;  // moments
};

const bool adamw_registered =
    (device_optimizers().add("adamw", "the rule of optim/adamw.cpp",
                             [](const OptimizerOptions& options, ParameterArena& arena) {
                               return std::unique_ptr<DeviceOptimizer>(new DeviceAdamW(options, arena));
                             }),
     true);

}  // namespace
}  // namespace topknot::cuda
