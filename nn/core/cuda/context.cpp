#include "nn/core/cuda/context.h"

#include "nn/core/cuda/pool.h"

namespace topknot::cuda {
namespace {

thread_local Context* current_context = nullptr;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string place(const char* file, int line) {
  const Context* context = Context::current_or_null();
  return (context ? ", rank " + std::to_string(context->options().rank) : std::string()) + ", at " + file +
         ":" + std::to_string(line);
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
  const std::string text = std::string(call) + ": " + cudaGetErrorString(status) + " (" +
                           cudaGetErrorName(status) + ")" + place(file, line);
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
  const std::string call = std::string("launch of ") + name + " (" + std::to_string(grid) + " blocks of " +
                           std::to_string(block) + " threads)";
  check_cuda(status, call.c_str(), __FILE__, __LINE__);
}

std::string problem() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major >= 8)
      return "";
    return "the GPU is too old: compute capability 8.0 (Ampere) or newer is needed";
  }
  cudaGetLastError();
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (status == cudaErrorInsufficientDriver && driver > 0)
    return "the GPU's driver is too old: it serves CUDA " + version_text(driver) + ", this build needs " +
           version_text(runtime) + "; update the driver";
  if (status == cudaSuccess || status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver)
    return "no GPU was found; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  return std::string("the GPU cannot be used: ") + cudaGetErrorString(status) + " (" +
         cudaGetErrorName(status) + "); check nvidia-smi";
}

cudaStream_t compute_stream() {
  return Context::current().stream();
}

bool early_launches() {
  return current_context && current_context->early_launches();
}

Context& Context::current() {
  TOPKNOT_CHECK(current_context, "work on a GPU in a thread without a context");
  return *current_context;
}

Context* Context::current_or_null() {
  return current_context;
}

Context::Use::Use(Context& context) : before_(current_context) {
  TOPKNOT_CUDA(cudaSetDevice(context.options().device));
  current_context = &context;
}

Context::Use::~Use() {
  current_context = before_;
}

Context::Context(const ContextOptions& options) : options_(options) {
  if (const std::string why = problem(); !why.empty()) throw UserError(why);
  int count = 0;
  TOPKNOT_CUDA(cudaGetDeviceCount(&count));
  if (options.device >= count)
    throw UserError("GPU " + std::to_string(options.device) + " was asked for, and there are " +
                    std::to_string(count) + "; start fewer ranks per host, or check CUDA_VISIBLE_DEVICES");
  TOPKNOT_CUDA(cudaSetDevice(options.device));
  int major = 0;
  TOPKNOT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device));
  if (major < 8)
    throw UserError("GPU " + std::to_string(options.device) +
                    " is too old: compute capability 8.0 (Ampere) or newer is needed; compute on the CPU");
  if (options.early_launch && !kernels_await()) end_early_launches();
  int least = 0, greatest = 0;
  TOPKNOT_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  pool_ = std::make_shared<Pool>(options.device);
  TOPKNOT_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least));
  TOPKNOT_CUDA(cudaStreamCreateWithPriority(&communication_, cudaStreamNonBlocking, greatest));
}

Context::~Context() {
  // No throwing: the GPU may be lost, and then every call fails.
  if (current_context == this) current_context = nullptr;
  cudaSetDevice(options_.device);
  if (stream_) cudaStreamSynchronize(stream_);
  if (communication_) cudaStreamSynchronize(communication_);
  while (!kept_.empty()) kept_.pop_back();
  if (workspace_) pool_->release(workspace_);
  for (void* memory : old_workspaces_) pool_->release(memory);
  if (stream_) cudaStreamDestroy(stream_);
  if (communication_) cudaStreamDestroy(communication_);
  cudaGetLastError();
}

void* Context::workspace(std::size_t bytes) {
  if (bytes <= workspace_bytes_) return workspace_;
  if (workspace_) old_workspaces_.push_back(workspace_);
  workspace_ = nullptr, workspace_bytes_ = 0;
  workspace_ = pool_->allocate(bytes);
  workspace_bytes_ = bytes;
  return workspace_;
}

void* Context::allocate(std::size_t bytes) {
  return pool_->allocate(bytes);
}

void release_to_pool(Pool& pool, void* data) noexcept {
  pool.release(data);
}

float milliseconds_between(const Event& from, const Event& to) {
  float ms = 0;
  TOPKNOT_CUDA(cudaEventElapsedTime(&ms, from.get(), to.get()));
  return ms;
}

}  // namespace topknot::cuda
