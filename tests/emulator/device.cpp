// CUDA's run-time library on the machine of machine.h: devices and errors.
#include <cstdio>

#include "tests/emulator/machine_state.h"

using namespace topknot::emulator;

namespace {

// Name and words of an error.
std::pair<const char*, const char*> said(cudaError_t error) {
#define NAMED(name, words) \
  if (error == name) return {#name, words}
  NAMED(cudaSuccess, "no error");
  NAMED(cudaErrorMemoryAllocation, "out of memory");
  NAMED(cudaErrorNoDevice, "no CUDA-capable device is detected");
  NAMED(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version");
  NAMED(cudaErrorUnknown, "unknown error");
  NAMED(cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration");
  NAMED(cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle");
  NAMED(cudaErrorInvalidValue, "cudaErrorInvalidValue");
#undef NAMED
  return {"another error", "another error"};
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  TOPKNOT_STAND_IN(cudaGetDeviceCount);
  if (state().machine.driver_too_old) return result(cudaErrorInsufficientDriver);
  if (state().machine.devices == 0) return result(cudaErrorNoDevice);
  *count = state().machine.devices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  TOPKNOT_STAND_IN(cudaSetDevice);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  this_thread().device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = this_thread().device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  TOPKNOT_STAND_IN(cudaGetDeviceProperties);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated GPU");
  properties->totalGlobalMem = state().machine.memory;
  properties->major = state().machine.major;
  properties->minor = state().machine.minor;
  properties->multiProcessorCount = 4;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = state().machine.code;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  TOPKNOT_STAND_IN(cudaDeviceGetAttribute);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 4
           : attribute == cudaDevAttrComputeCapabilityMajor ? state().machine.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? state().machine.minor
                                                            : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, std::size_t(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  return *version = state().machine.devices == 0 ? 0 : 13000, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  {
    TOPKNOT_STAND_IN(cudaDeviceSynchronize);
    if (const cudaError_t error = conflicts_with_captures(); error != cudaSuccess) return error;
  }
  return wait_until(run_all);
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = this_thread().last_error;
  if (!state().lost) this_thread().last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return this_thread().last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  return said(error).first;
}
const char* cudaGetErrorString(cudaError_t error) {
  return said(error).second;
}
cudaError_t cudaFuncGetName(const char** name, const void*) {
  return *name = "a kernel", cudaSuccess;
}

}  // extern "C"
