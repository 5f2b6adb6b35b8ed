#pragma once
// The device of a test. The suites of tests/nn/ops are compiled twice: test_nn runs them on the CPU,
// test_cuda and gpu_tests on a GPU or its emulator. A case that begins with
//   const OnDevice device(GENERATE(from_range(activation_types())));
// runs on the binary's device in each of its types; all others run on the CPU in both.

#include <memory>
#include <vector>

#include "nn/core/tensor.h"

namespace topknot::testing {

// Of the OnDevice that lives; without one: the CPU, f32.
inline Device& test_device() {
  static Device device;
  return device;
}
inline DType& activation_type() {
  static DType type = DType::f32;
  return type;
}
inline bool on_gpu() {
  return test_device().kind != DeviceKind::cpu;
}

// Layouts of images of so many channels there.
inline std::vector<Layout> layouts(std::int64_t channels) {
  if (on_gpu()) return {Layout::nhwc};
  if (channels % channel_block() != 0) return {Layout::plain};
  return {Layout::plain, Layout::blocked};
}

// The binary's own, in tests/nn/cpu.cpp and tests/cuda/gpu.cpp.
std::vector<DType> activation_types();
// Puts the device to use for as long as what is returned lives, and sets `device` to it.
std::shared_ptr<void> use_device(DType type, bool deterministic, Device& device);

class OnDevice {
 public:
  explicit OnDevice(DType type = DType::f32, bool deterministic = true)
      : used_(use_device(type, deterministic, test_device())) {
    activation_type() = type;
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() {
    test_device() = {};
    activation_type() = DType::f32;
  }

 private:
  std::shared_ptr<void> used_;
};

}  // namespace topknot::testing
