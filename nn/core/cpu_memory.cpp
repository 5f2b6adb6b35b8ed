#include "nn/core/cpu_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include "nn/base/memory.h"

namespace topknot {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// From half a huge page on, whole huge pages.
std::size_t rounded(std::size_t floats) {
  const std::size_t bytes = floats * sizeof(float) + 64, unit = bytes >= kHugePage / 2 ? kHugePage : 64;
  return (bytes + unit - 1) / unit * unit;
}

void* fresh(std::size_t bytes) {
  void* data = std::aligned_alloc(bytes >= kHugePage ? kHugePage : 64, bytes);
  // Fewer entries in the address translation cache; a hint, so its failure does not matter.
  if (data && bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

// A build with TOPKNOT_POISON finds what reads memory before anything was written to it: its results are NaN.
// All bits set are a NaN in fp32 and in bf16. Reused blocks are filled too; glibc fills other memory.
void poison([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef TOPKNOT_POISON
  std::memset(data, 0xFF, bytes);
#endif
}
#ifdef TOPKNOT_POISON
// Filled with the complement of the lowest byte. (Address sanitizer: ASAN_OPTIONS=malloc_fill_byte.)
[[maybe_unused]] const int poisons_malloc = mallopt(M_PERTURB, 0x100);
#endif

}  // namespace

float* CpuMemory::allocate(std::size_t floats) {
  const std::size_t bytes = rounded(floats);
  {
    const std::lock_guard lock(mutex_);
    if (float* data = cached(bytes)) {
      poison(data, bytes);
      return data;
    }
    const std::size_t in_use = in_use_ + bytes;
    if (in_use + cached_ > 2 * std::max(most_in_use_, in_use)) free_cached();
  }
  void* data = fresh(bytes);
  if (!data) {
    release_cached();
    data = fresh(bytes);
  }
  if (!data) throw OutOfMemory("a buffer", static_cast<double>(bytes));
  const std::lock_guard lock(mutex_);
  count(bytes);
  poison(data, bytes);
  return static_cast<float*>(data);
}

float* CpuMemory::cached(std::size_t bytes) {
  const auto list = free_.find(bytes);
  if (list == free_.end() || list->second.empty()) return nullptr;
  auto& blocks = list->second;
  // A block that this thread released is probably still in this core's cache.
  auto block = std::find_if(blocks.rbegin(), blocks.rend(),
                            [me = std::this_thread::get_id()](const Block& b) { return b.last_user == me; });
  if (block == blocks.rend()) block = blocks.rbegin();
  float* data = block->data;
  blocks.erase(std::next(block).base());
  cached_ -= bytes;
  count(bytes);
  return data;
}

void CpuMemory::count(std::size_t bytes) {
  in_use_ += bytes;
  most_in_use_ = std::max(most_in_use_, in_use_);
}

void CpuMemory::release(float* data, std::size_t floats) {
  const std::size_t bytes = rounded(floats);
  const std::lock_guard lock(mutex_);
  free_[bytes].push_back({data, std::this_thread::get_id()});
  in_use_ -= bytes;
  cached_ += bytes;
}

void CpuMemory::free_cached() {
  for (auto& [bytes, list] : free_)
    for (const Block& block : list) std::free(block.data);
  free_.clear();
  cached_ = 0;
}

}  // namespace topknot
