#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "nn/core/bfloat16.h"
#include "nn/core/checksum.h"
#include "nn/core/cpu_memory.h"
#include "nn/core/device.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

class CpuBackend final : public DeviceBackend {
 public:
  float* allocate(std::size_t floats) override { return memory_.allocate(floats); }
  void release(float* data, std::size_t floats) override { memory_.release(data, floats); }
  void release_cached() override { memory_.release_cached(); }

  void fill_zero(float* data, std::size_t floats) override { std::memset(data, 0, floats * sizeof(float)); }
  void fill(float* data, std::size_t floats, float value) override { std::fill_n(data, floats, value); }
  void to_device(float* device, const float* host, std::size_t floats) override {
    std::copy_n(host, floats, device);
  }
  void to_host(float* host, const float* device, std::size_t floats) override {
    std::copy_n(device, floats, host);
  }
  void copy(const float* from, float* to, std::size_t floats) override { std::copy_n(from, floats, to); }
  void add(DType type, const void* a, const void* b, void* out, std::size_t n) override {
    if (type == DType::bf16)
      return add_bfloat16(static_cast<const BFloat16*>(a), static_cast<const BFloat16*>(b),
                          static_cast<BFloat16*>(out), n);
    const auto *x = static_cast<const float*>(a), *y = static_cast<const float*>(b);
    auto* sum = static_cast<float*>(out);
#pragma omp parallel for simd schedule(static) if (n > 65536)
    for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
  }
  std::vector<std::uint64_t> checksums(std::span<const std::span<const float>> slices) override {
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

 private:
  static void add_bfloat16(const BFloat16* a, const BFloat16* b, BFloat16* sum, std::size_t n) {
    constexpr std::size_t kPart = 65536;
#pragma omp parallel for schedule(static) if (n > kPart)
    for (std::size_t at = 0; at < n; at += kPart)
      topknot::add(a + at, b + at, std::min(kPart, n - at), sum + at);
  }

  CpuMemory memory_;
};

}  // namespace

DeviceBackend& cpu_backend() {
  // Never destroyed: tensors may outlive static destruction order.
  static auto* instance = new CpuBackend;
  return *instance;
}

namespace {

// Whether oneDNN will use it, so that ONEDNN_MAX_CPU_ISA keeps working.
bool onednn_uses(dnnl::cpu_isa wanted) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa()), bits = static_cast<unsigned>(wanted);
  return (isa & bits) == bits;
}

}  // namespace

int channel_block() {
  static const int block = onednn_uses(dnnl::cpu_isa::avx512_core) ? 16 : 8;
  return block;
}

bool cpu_has_bfloat16() {
  static const bool has = onednn_uses(dnnl::cpu_isa::avx512_core_bf16);
  return has;
}

}  // namespace topknot
