#include "tests/cuda/fixture.h"
#include "tests/support/on_device.h"

namespace topknot::testing {

std::vector<DType> activation_types() {
  return {DType::f32, DType::bf16};
}
std::shared_ptr<void> use_device(DType type, bool deterministic, Device& device) {
  const auto gpu = std::make_shared<OnGpu>(
      type == DType::bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32, deterministic);
  device = gpu->device();
  return gpu;
}

}  // namespace topknot::testing
