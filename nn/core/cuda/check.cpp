#include "nn/core/cuda/check.h"

#include <fmt/format.h>

#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

std::string place(const char* file, int line) {
  const Context* context = Context::current_or_null();
  return fmt::format("{}, at {}:{}", context ? fmt::format(", rank {}", context->options().rank) : "", file,
                     line);
}

// After these the process cannot use the GPU any more.
bool is_lost(cudaError_t status) {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that a later check does not report it again
  const std::string text = fmt::format("{}: {} ({}){}", call, cudaGetErrorString(status),
                                       cudaGetErrorName(status), place(file, line));
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  if (is_lost(status))
    throw CudaError(text + "\nthe GPU is lost to this process; see the kernel's log (dmesg) for an Xid line");
  throw CudaError(text);
}

void fail_cuda(const std::string& call, const std::string& what, const char* file, int line) {
  throw CudaError(call + ": " + what + place(file, line));
}

void check_launch(const void* kernel, unsigned grid, unsigned block) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  const char* name = nullptr;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess || !name) name = "?";
  const std::string call = fmt::format("launch of {} ({} blocks of {} threads)", name, grid, block);
  check_cuda(status, call.c_str(), __FILE__, __LINE__);
}

}  // namespace topknot::cuda
