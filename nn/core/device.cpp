#include "nn/core/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "nn/base/check.h"
#include "nn/base/checksum.h"
#include "nn/core/bfloat16.h"
#include "nn/core/cpu_memory.h"

namespace topknot {
namespace {

// Never destroyed: tensors may outlive static destruction order.
CpuMemory& memory() {
  static auto* memory = new CpuMemory;
  return *memory;
}

void add_bfloat16(const BFloat16* a, const BFloat16* b, BFloat16* sum, std::size_t n) {
  constexpr std::size_t kPart = 65536;
#pragma omp parallel for schedule(static) if (n > kPart)
  for (std::size_t at = 0; at < n; at += kPart) add(a + at, b + at, std::min(kPart, n - at), sum + at);
}

void add_of_type(DType type, const void* a, const void* b, void* out, std::size_t n) {
  if (type == DType::bf16)
    return add_bfloat16(static_cast<const BFloat16*>(a), static_cast<const BFloat16*>(b),
                        static_cast<BFloat16*>(out), n);
  const auto *x = static_cast<const float*>(a), *y = static_cast<const float*>(b);
  auto* sum = static_cast<float*>(out);
#pragma omp parallel for simd schedule(static) if (n > 65536)
  for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

std::vector<std::uint64_t> checksums_of(std::span<const std::span<const float>> slices) {
  std::vector<std::uint64_t> sums;
  for (const std::span<const float> slice : slices) {
    std::uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = 0; i < slice.size(); ++i)
      sum += checksum_term(i, std::bit_cast<std::uint32_t>(slice[i]));
    sums.push_back(sum);
  }
  return sums;
}

constexpr DeviceBackend kBackend{
    .allocate = [](std::size_t floats) { return memory().allocate(floats); },
    .release = [](float* data, std::size_t floats) { memory().release(data, floats); },
    .release_cached = [] { memory().release_cached(); },
    .to_device = [](float* device, const float* host, std::size_t n) { std::copy_n(host, n, device); },
    .to_host = [](float* host, const float* device, std::size_t n) { std::copy_n(device, n, host); },
    .fill_zero = [](float* data, std::size_t n) { std::memset(data, 0, n * sizeof(float)); },
    .fill = [](float* data, std::size_t n, float value) { std::fill_n(data, n, value); },
    .copy = [](const float* from, float* to, std::size_t n) { std::copy_n(from, n, to); },
    .add = add_of_type,
    .add_scaled =
        [](float* sum, const float* values, std::size_t n, float factor) {
          for (std::size_t i = 0; i < n; ++i) sum[i] += factor * values[i];
        },
    .add_to_sum = [](double* sum, const float* value, double factor) { *sum += factor * *value; },
    .restore_if_bad =
        [](const StepStatus* status, const float* from, float* to, std::size_t n) {
          if (status->bad) std::copy_n(from, n, to);
        },
    .checksums = checksums_of,
};

}  // namespace

const DeviceBackend& cpu_backend() {
  return kBackend;
}

std::string Device::str() const {
  return kind == DeviceKind::cpu ? "cpu" : fmt::format("cuda:{}", index);
}

const DeviceBackend& backend(Device device) {
  return device.kind == DeviceKind::cpu ? cpu_backend() : cuda_backend();
}

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "auto") return cuda_available() ? Device{DeviceKind::cuda, 0} : Device{};
  if (name == "cuda") {
    if (const std::string problem = cuda_problem(); !problem.empty())
      throw UserError("train.device=cuda: " + problem + ", or set train.device=cpu (or auto)");
    return {DeviceKind::cuda, 0};
  }
  throw UserError("unknown device '" + name + "'; known: auto, cpu, cuda");
}

}  // namespace topknot
