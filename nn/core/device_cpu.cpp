// CPU memory. Blocks are kept for reuse by exact size: a training step asks for the same sizes every time,
// and a fresh large block costs more in page faults than the arithmetic done on it.
#include <fmt/format.h>

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "nn/core/base/check.h"
#include "nn/core/base/memory.h"
#include "nn/core/bfloat16.h"
#include "nn/core/checksum.h"
#include "nn/core/device.h"
#include "nn/core/tensor.h"

namespace topknot {
namespace {

class CpuBackend final : public DeviceBackend {
 public:
  ~CpuBackend() override { release_cached(); }

  float* allocate(std::size_t floats) override {
    const std::size_t bytes = rounded(floats);
    {
      std::lock_guard lock(mutex_);
      auto& list = free_[bytes];
      if (!list.empty()) {
        // A block that this thread released is probably still in this core's cache.
        auto block =
            std::find_if(list.rbegin(), list.rend(),
                         [me = std::this_thread::get_id()](const Block& b) { return b.last_user == me; });
        if (block == list.rend()) block = list.rbegin();
        float* data = block->data;
        list.erase(std::next(block).base());
        return data;
      }
    }
    void* data = std::aligned_alloc(bytes >= kHugePage ? kHugePage : 64, bytes);
    // Fewer entries in the address translation cache; a hint, so its failure does not matter.
    if (data && bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
    if (!data) throw OutOfMemory("a buffer", static_cast<double>(bytes));
    return static_cast<float*>(data);
  }

  void release(float* data, std::size_t floats) override {
    std::lock_guard lock(mutex_);
    free_[rounded(floats)].push_back({data, std::this_thread::get_id()});
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    for (auto& [bytes, list] : free_)
      for (const Block& block : list) std::free(block.data);
    free_.clear();
  }

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

  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  // From half a huge page on, whole huge pages.
  static std::size_t rounded(std::size_t floats) {
    const std::size_t bytes = floats * sizeof(float) + 64, unit = bytes >= kHugePage / 2 ? kHugePage : 64;
    return (bytes + unit - 1) / unit * unit;
  }

  struct Block {
    float* data;
    std::thread::id last_user;
  };
  std::mutex mutex_;
  std::unordered_map<std::size_t, std::vector<Block>> free_;
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
