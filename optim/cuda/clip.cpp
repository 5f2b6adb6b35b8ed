#include "optim/clip.h"
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "optim/cuda/clip_kernels.h"
#include "optim/cuda/device_optimizer.h"

namespace topknot::cuda {

struct DeviceClip::State {
  std::size_t elements;
  DeviceArray<double> blocks;
};

DeviceClip::DeviceClip(std::size_t elements)
    : state_(new State{elements, DeviceArray<double>((elements + kClipBlock - 1) / kClipBlock)}) {}
DeviceClip::~DeviceClip() = default;

void DeviceClip::sum_of_squares(cudaStream_t stream, std::span<const float> values, double* sum, bool add) {
  TOPKNOT_CHECK(values.size() <= state_->elements, "a longer vector than clipping was made for");
  clip_sum_of_squares(stream, values.data(), values.size(), state_->blocks.data(), sum, add);
}

void DeviceClip::scale(cudaStream_t stream, std::span<float> values, const double* sum, double max_norm) {
  check_clip_norm(max_norm);
  clip_scale(stream, values.data(), values.size(), sum, max_norm);
}

void DeviceClip::set_gradient_scale(cudaStream_t stream, const double* sum, double max_norm,
                                    StepParameters* parameters) {
  check_clip_norm(max_norm);
  clip_set_gradient_scale(stream, sum, max_norm, parameters);
}

}  // namespace topknot::cuda
