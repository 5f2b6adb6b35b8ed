#pragma once
// An emulated cuDNN as it is at first, and a convolution's tensors on the current context's GPU.

#include "nn/core/cuda/trial.h"
#include "nn/ops/cuda/conv_algorithms.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/emulator/cudnn_convolution.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot::testing {

struct ConvMachine {
  ConvMachine() { clear(); }
  ~ConvMachine() { clear(); }
  static void clear() {
    emulator::reset();
    emulator::convolutions() = {};
  }
};

inline Tensor images(const reference::Conv& g, DType type = DType::f32) {
  return gpu_tensor(random_values(g.x_size(), 1), {g.n, g.in, g.height, g.width}, Layout::nhwc, type);
}
inline GpuLeaf weight(const reference::Conv& g) {
  return GpuLeaf(g.geometry().weight_shape(), random_values(g.w_size(), 2));
}

}  // namespace topknot::testing
