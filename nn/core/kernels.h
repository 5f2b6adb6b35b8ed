#pragma once
// Functions that differ between devices: a struct of function pointers, registered once for each kind of device by the file
// that has them, and found by the device of the memory.

#include <array>
#include <cstddef>

namespace topknot {

enum class DeviceKind { cpu, cuda };

template <class Kernels>
inline std::array<const Kernels*, 2> registered_kernels{};  // by DeviceKind; null: the device has none

template <class Kernels>
class RegisterKernels {
 public:
  RegisterKernels(DeviceKind kind, const Kernels& kernels) : kernels_(kernels) {
    registered_kernels<Kernels>[static_cast<std::size_t>(kind)] = &kernels_;
  }
  RegisterKernels(const RegisterKernels&) = delete;

 private:
  Kernels kernels_;
};

template <class Kernels>
const Kernels* find_kernels(DeviceKind kind) {
  return registered_kernels<Kernels>[static_cast<std::size_t>(kind)];
}

}  // namespace topknot
