#pragma once
// Where a tensor lives. The CPU is always there; CUDA is there when the build found it and a GPU answers.

#include <cstddef>
#include <string>

namespace topknot {

enum class DeviceKind { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of the GPU; 0 for the CPU
  bool operator==(const Device&) const = default;
  std::string str() const;  // "cpu", "cuda:1"
};

// What a device's backend offers the core. One instance a device kind, chosen by file: device_cpu.cpp always,
// device_cuda.cpp or device_stub.cpp for CUDA.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual float* allocate(
      std::size_t floats) = 0;  // 64-byte aligned, contents undefined; throws when out of memory
  virtual void release(float* data, std::size_t floats) = 0;
  virtual void release_cached() = 0;  // gives memory kept for reuse back to the system
  virtual void fill_zero(float* data, std::size_t floats) = 0;
};

// Throws UserError where the device cannot be used, and says why.
DeviceBackend& backend(Device device);

DeviceBackend& cpu_backend();
DeviceBackend& cuda_backend();  // throws UserError in a build without CUDA
bool cuda_available();

// "auto" (a GPU if there is one), "cpu" or "cuda"; throws UserError for anything else or a GPU that is not
// there.
Device parse_device(const std::string& name);

}  // namespace topknot
