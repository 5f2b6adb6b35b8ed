// CUDA's run-time library on the machine of machine.h: memory and copies.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/emulator/machine_state.h"

using namespace topknot::emulator;

namespace {

constexpr std::size_t kGuard = 256;  // bytes before and after each block, watched

// A guard holds NaNs too, as float and as bfloat16, and not the bytes of fresh memory.
unsigned char guard_byte(const char* at) {
  return reinterpret_cast<std::uintptr_t>(at) % 2 ? 0x7F : 0xA5;
}
void set_guard(char* first) {
  for (char* at = first; at < first + kGuard; ++at) *at = char(guard_byte(at));
}
bool untouched(const char* first) {
  return std::all_of(first, first + kGuard,
                     [](const char& c) { return static_cast<unsigned char>(c) == guard_byte(&c); });
}

void check_guards(const char* data, std::size_t bytes) {
  if (!untouched(data - kGuard) || !untouched(data + bytes)) {
    std::fprintf(stderr, "emulated GPU: memory beside a block of %zu bytes was written to\n", bytes);
    std::abort();
  }
}

// A capture would keep the address of what the host may give back before the graph runs.
bool pageable(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  const auto inside = [&](const auto& blocks) {
    auto block = blocks.upper_bound(const_cast<char*>(at));
    return block != blocks.begin() && (--block, at + bytes <= block->first + block->second);
  };
  return !inside(state().memory) && !inside(state().locked);
}

}  // namespace

extern "C" {

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  TOPKNOT_STAND_IN(cudaMemGetInfo);
  *total = state().machine.memory;
  *free = *total - std::min(*total, state().counts.bytes_in_use);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  TOPKNOT_STAND_IN(cudaMalloc);
  if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
  if (state().counts.bytes_in_use + bytes > state().machine.memory) return result(cudaErrorMemoryAllocation);
  auto* block = static_cast<char*>(std::aligned_alloc(256, (bytes + 2 * kGuard + 255) / 256 * 256));
  set_guard(block);
  std::memset(block + kGuard, 0xFF, bytes);
  set_guard(block + kGuard + bytes);
  *data = block + kGuard;
  state().memory[block + kGuard] = bytes;
  Counts& counts = state().counts;
  counts.bytes_in_use += bytes, ++counts.allocations;
  counts.most_bytes_in_use = std::max(counts.most_bytes_in_use, counts.bytes_in_use);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  {
    TOPKNOT_STAND_IN(cudaFree);
    if (const cudaError_t error = captures() ? conflicts_with_captures() : unsafe_in_captures();
        error != cudaSuccess)
      return error;
  }
  if (const cudaError_t error = wait_until(run_all); error != cudaSuccess) return error;
  const std::lock_guard lock(state().mutex);
  const auto at = state().memory.find(static_cast<char*>(data));
  if (at == state().memory.end()) return result(cudaErrorInvalidValue);
  check_guards(at->first, at->second);
  state().counts.bytes_in_use -= at->second;
  std::memset(at->first, 0xFF, at->second);  // for whoever still reads it
  std::free(at->first - kGuard);
  state().memory.erase(at);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  TOPKNOT_STAND_IN(cudaHostAlloc);
  if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
  *data = std::malloc(bytes);
  if (!*data) return result(cudaErrorMemoryAllocation);
  std::memset(*data, 0xFF, bytes);
  state().locked[static_cast<char*>(*data)] = bytes;
  ++state().counts.allocations;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  if (!data) return cudaSuccess;
  {
    const std::lock_guard lock(state().mutex);
    if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
  }
  wait_until(run_all);
  const std::lock_guard lock(state().mutex);
  state().locked.erase(static_cast<char*>(data));
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  TOPKNOT_STAND_IN(cudaHostRegister);
  state().locked[static_cast<char*>(data)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  const cudaError_t error = wait_until(run_all);
  const std::lock_guard lock(state().mutex);
  state().locked.erase(static_cast<char*>(data));
  return error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaMemcpyAsync);
  if (kind == cudaMemcpyHostToDevice) state().counts.uploaded += bytes;
  if (kind == cudaMemcpyDeviceToHost) state().counts.downloaded += bytes;
  const auto stream = find(s);
  if (stream && stream->capture && (pageable(to, bytes) || pageable(from, bytes)))
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
  return put(s, [=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  {
    TOPKNOT_STAND_IN(cudaMemcpy);
    if (const cudaError_t error = captures() ? conflicts_with_captures() : unsafe_in_captures();
        error != cudaSuccess)
      return error;
  }
  const cudaError_t error = wait_until(run_all);
  if (error == cudaSuccess) std::memcpy(to, from, bytes);
  return error;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaMemcpy2DAsync);
  if (width > to_pitch || width > from_pitch) return result(cudaErrorInvalidPitchValue);
  return put(s, [=] {
    for (std::size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                  width);
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaMemsetAsync);
  return put(s, [=] { std::memset(to, value, bytes); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  TOPKNOT_STAND_IN(cudaLaunchHostFunc);
  return put(s, [=] { fn(data); });
}

}  // extern "C"
