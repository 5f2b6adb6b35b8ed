#pragma once
// GPU memory kept for reuse, for one stream: a block that was released is handed out again to later work of the
// same stream, in whose order that is safe. Sizes are rounded up, so that the blocks of a step fit the next.

#include <cstddef>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace topknot::cuda {

class Pool {
 public:
  explicit Pool(int device) : device_(device) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // 512-byte aligned. Gives cached blocks back and tries again where memory is short; then throws OutOfMemory.
  void* allocate(std::size_t bytes);
  void release(void* data) noexcept;
  // Gives back what nobody uses. Waits for the GPU.
  void release_cached() noexcept;

  std::size_t in_use() const;    // bytes handed out
  std::size_t reserved() const;  // bytes taken from the GPU

  static std::size_t rounded(std::size_t bytes);

 private:
  void* take(std::size_t bytes);
  const int device_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
  std::unordered_map<void*, std::size_t> handed_out_;
  std::size_t in_use_ = 0, reserved_ = 0;
};

}  // namespace topknot::cuda
