#pragma once
// The device of a tensor. The CPU is always there; CUDA is there if the build found it and a GPU can be used.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "nn/core/step.h"

namespace topknot {

enum class DeviceKind { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of the GPU; 0 for the CPU
  bool operator==(const Device&) const = default;
  std::string str() const;  // "cpu", "cuda:1"
};

// The element type. Parameters, gradients and statistics are always f32.
enum class DType {
  f32,
  bf16,  // activations under train.precision bf16
};
inline std::size_t size_of(DType type) {
  return type == DType::f32 ? 4 : 2;
}

// A device's functions on vectors in its memory, for the core, the optimizers and a step. Work on a GPU is
// put on the current context's stream, and nothing waits but to_device(), to_host(), checksums(),
// release_cached(), and allocate() when memory is short.
struct DeviceBackend {
  float* (*allocate)(std::size_t floats);  // 64-byte aligned, contents undefined; throws when out of memory
  void (*release)(float* data, std::size_t floats);
  void (*release_cached)();  // gives memory kept for reuse back to the system
  // Between this device and the host; both block until the copy is complete.
  void (*to_device)(float* device, const float* host, std::size_t floats);
  void (*to_host)(float* host, const float* device, std::size_t floats);

  void (*fill_zero)(float* data, std::size_t floats);
  void (*fill)(float* data, std::size_t floats, float value);
  void (*copy)(const float* from, float* to, std::size_t floats);
  // out[i] = a[i] + b[i]; out may be a or b.
  void (*add)(DType type, const void* a, const void* b, void* out, std::size_t n);
  // sum[i] += factor * values[i]
  void (*add_scaled)(float* sum, const float* values, std::size_t floats, float factor);
  // *sum += factor * *value, in double; both in the device's memory.
  void (*add_to_sum)(double* sum, const float* value, double factor);
  // to = from if the step is bad; `status` is in the device's memory.
  void (*restore_if_bad)(const StepStatus* status, const float* from, float* to, std::size_t floats);
  // The checksum (nn/base/checksum.h) of each slice; the same on every device.
  std::vector<std::uint64_t> (*checksums)(std::span<const std::span<const float>> slices);
};

// A value in a device's memory, read when all before it is done; of whole floats.
template <class T>
T value_on(const DeviceBackend& backend, const T* from) {
  static_assert(sizeof(T) % sizeof(float) == 0 && std::is_trivially_copyable_v<T>);
  T value;
  backend.to_host(reinterpret_cast<float*>(&value), reinterpret_cast<const float*>(from),
                  sizeof(T) / sizeof(float));
  return value;
}

// Throws UserError if the device cannot be used, and says why.
const DeviceBackend& backend(Device device);

const DeviceBackend& cpu_backend();
const DeviceBackend& cuda_backend();  // throws UserError in a build without CUDA
bool cuda_available();
// "" if a GPU can be used; else why not, and what to do. First sets CUDA_DEVICE_MAX_CONNECTIONS if unset.
std::string cuda_problem();
int gpu_count();               // GPUs that this process sees; 0 in a build without CUDA
std::string gpu_bus(int gpu);  // its PCI address, such as "0000:3B:00.0"
bool built_with_cuda();

// "auto" (a GPU if there is one), "cpu" or "cuda"; UserError for anything else or a missing GPU.
Device parse_device(const std::string& name);

// Functions that differ between devices: a struct of function pointers, registered once for each kind of
// device by the file that has them, and found by the device of the memory.
template <class Kernels>
inline std::array<const Kernels*, 2> registered_kernels{};  // by DeviceKind; null: the device has none

template <DeviceKind kind, class Kernels>
bool add_kernels(const Kernels& kernels) {  // returns true, for the static object that registers them
  static const Kernels kept = kernels;
  registered_kernels<Kernels>[static_cast<std::size_t>(kind)] = &kept;
  return true;
}
template <class Kernels>
bool add_cpu_kernels(const Kernels& kernels) {
  return add_kernels<DeviceKind::cpu>(kernels);
}
template <class Kernels>
bool add_cuda_kernels(const Kernels& kernels) {
  return add_kernels<DeviceKind::cuda>(kernels);
}

template <class Kernels>
const Kernels* find_kernels(DeviceKind kind) {
  return registered_kernels<Kernels>[static_cast<std::size_t>(kind)];
}

}  // namespace topknot
