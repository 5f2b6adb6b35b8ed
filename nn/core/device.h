#pragma once
// Where a tensor lives. The CPU is always there; CUDA is there when the build found it and a GPU can be used.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nn/core/kernels.h"

namespace topknot {

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of the GPU; 0 for the CPU
  bool operator==(const Device&) const = default;
  std::string str() const;  // "cpu", "cuda:1"
};

// What an element is. Parameters, gradients and statistics are always f32.
enum class DType {
  f32,
  bf16,  // activations under train.precision bf16
};
inline std::size_t size_of(DType type) {
  return type == DType::f32 ? 4 : 2;
}

// What a device's backend offers the core. One instance per device kind, chosen by file: device_cpu.cpp always,
// cuda/device.cpp or device_stub.cpp for CUDA.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual float* allocate(
      std::size_t floats) = 0;  // 64-byte aligned, contents undefined; throws when out of memory
  virtual void release(float* data, std::size_t floats) = 0;
  virtual void release_cached() = 0;  // gives memory kept for reuse back to the system
  virtual void fill_zero(float* data, std::size_t floats) = 0;
  virtual void fill(float* data, std::size_t floats, float value) = 0;
  // Between this device and the host; both block until the copy is complete.
  virtual void to_device(float* device, const float* host, std::size_t floats) = 0;
  virtual void to_host(float* host, const float* device, std::size_t floats) = 0;
  virtual void copy(const float* from, float* to, std::size_t floats) = 0;  // on this device
  // out[i] = a[i] + b[i]; out may be a or b.
  virtual void add(DType type, const void* a, const void* b, void* out, std::size_t n) = 0;
  // The checksum (nn/core/checksum.h) of each slice; the same on every device. Blocks until it is known.
  virtual std::vector<std::uint64_t> checksums(std::span<const std::span<const float>> slices) = 0;
};

// Throws UserError where the device cannot be used, and says why.
DeviceBackend& backend(Device device);

DeviceBackend& cpu_backend();
DeviceBackend& cuda_backend();  // throws UserError in a build without CUDA
bool cuda_available();
std::string cuda_problem();  // "" where a GPU can be used; else why not, and what to do
bool built_with_cuda();

// "auto" (a GPU if there is one), "cpu" or "cuda"; throws UserError for anything else or a GPU that is not
// there.
Device parse_device(const std::string& name);

}  // namespace topknot
