#pragma once
// Memory of tensors on the CPU. Released blocks are kept for reuse by exact size: a training step asks for
// the same sizes every time, and a fresh large block costs more in page faults than the arithmetic done on
// it. If sizes keep changing, all blocks together are at most twice the most that was ever in use.

#include <cstddef>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace topknot {

class CpuMemory {
 public:
  CpuMemory() = default;
  ~CpuMemory() { release_cached(); }

  // From any thread. Contents are undefined. Throws OutOfMemory.
  float* allocate(std::size_t floats);
  void release(float* data, std::size_t floats);
  void release_cached() {
    const std::lock_guard lock(mutex_);
    free_cached();
  }
  // Bytes in use and kept.
  std::size_t held() const {
    const std::lock_guard lock(mutex_);
    return in_use_ + cached_;
  }

 private:
  struct Block {
    float* data;
    std::thread::id last_user;
  };
  float* cached(std::size_t bytes);  // null: there is none
  void count(std::size_t bytes);     // as in use
  void free_cached();

  mutable std::mutex mutex_;
  std::unordered_map<std::size_t, std::vector<Block>> free_;  // by bytes
  std::size_t in_use_ = 0, most_in_use_ = 0, cached_ = 0;     // bytes
};

}  // namespace topknot
