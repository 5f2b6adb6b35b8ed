// The blocks of a kernel: one after the other; or interleaved, each of a few threads of the operating system
// with one at a time. Shared memory is thread_local, so these have their own. One of them runs at a time.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/emulator/machine.h"
#include "tests/emulator/races.h"

namespace topknot::emulator {
namespace {

constexpr std::size_t kAtATime = 3;

class Turns {
 public:
  explicit Turns(unsigned seed) : random_(seed), there_(kAtATime) {
    std::iota(there_.begin(), there_.end(), 0u);
  }

  std::size_t below(std::size_t n) { return random_() % n; }

  // By thread `me` of the operating system, whose turn it is but in the first call.
  void wait(std::size_t me) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return turn_ == me; });
  }
  void pass(std::size_t me) {
    give();
    wait(me);
  }
  void leave(std::size_t me) {
    std::erase(there_, me);
    if (!there_.empty()) give();
  }

 private:
  void give() {
    const std::lock_guard lock(mutex_);
    turn_ = there_[below(there_.size())];
    changed_.notify_all();
  }

  std::mt19937 random_;
  std::vector<std::size_t> there_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t turn_ = 0;
};

// Of this thread of the operating system, while it runs a block among others.
struct Turn {
  Turns* turns = nullptr;
  std::size_t mine = 0;
};
thread_local Turn turn;

void interleave(dim3 grid, dim3 size, std::uint64_t blocks, const std::function<void()>& body) {
  Turns turns(machine().interleave);
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[turns.below(i)]);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kAtATime; ++t)
    threads.emplace_back([&, t] {
      turns.wait(t);
      turn = {&turns, t};
      while (!order.empty()) {
        const std::uint32_t next = order.back();
        order.pop_back();
        run_block(grid, size, next, turns.below(2) == 1, body);
        turns.pass(t);
      }
      turn = {};
      turns.leave(t);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void give_way(unsigned once_in) {
  if (turn.turns && turn.turns->below(once_in) == 0) turn.turns->pass(turn.mine);
}

void run_kernel(const void* kernel, dim3 grid, dim3 size, const std::function<void()>& body) {
  races::begin_kernel(kernel);
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  if (machine().interleave != 0 && blocks > 1) return interleave(grid, size, blocks, body);
  const bool reverse = machine().reverse;
  for (std::uint64_t i = 0; i < blocks; ++i)
    run_block(grid, size, reverse ? blocks - 1 - i : i, reverse, body);
}

}  // namespace topknot::emulator
