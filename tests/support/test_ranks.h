#pragma once
// A few ranks as threads of the test, over the plainest communicator that can be: every collective is one
// gather under a lock. It notes what was called, and can pretend that collectives overlap with computation.

#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/communicator.h"
#include "tests/support/threads.h"

namespace topknot::testing {

class Hub {
 public:
  explicit Hub(int ranks) : slots_(static_cast<std::size_t>(ranks)) {}

  std::vector<std::vector<std::byte>> gather(int rank, std::span<const std::byte> mine) {
    std::unique_lock lock(mutex_);
    slots_[rank].assign(mine.begin(), mine.end());
    barrier(lock);
    auto all = slots_;
    barrier(lock);  // nobody writes the next collective's slots before all have read these
    return all;
  }
  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
    changed_.notify_all();
  }
  int size() const { return static_cast<int>(slots_.size()); }

 private:
  void barrier(std::unique_lock<std::mutex>& lock) {
    const int generation = generation_;
    if (++arrived_ == slots_.size()) {
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return generation_ != generation || !reason_.empty(); });
    if (generation_ == generation) throw CollectiveError("a peer gave up: " + reason_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::byte>> slots_;
  std::size_t arrived_ = 0;
  int generation_ = 0;
  std::string reason_;
};

class TestCommunicator : public Communicator {
 public:
  TestCommunicator(Hub& hub, int rank, bool overlaps)
      : Communicator({rank, hub.size(), "test", overlaps}), hub_(hub), rank_(rank) {}

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    calls.push_back("gather");
    all = hub_.gather(rank_, mine);
  }
  void all_reduce(std::span<float> data, SumOrder order) override {
    calls.push_back((order == SumOrder::ranks ? "ordered sum " : "sum ") + std::to_string(data.size()));
    sum(data);
  }
  void all_reduce(std::span<BFloat16> data, SumOrder order) override {
    calls.push_back((order == SumOrder::ranks ? "ordered sum of bfloat16 " : "sum of bfloat16 ") +
                    std::to_string(data.size()));
    std::vector<float> floats(data.size());
    to_float(data.data(), data.size(), floats.data());
    sum(std::span(floats));
    to_bfloat16(floats.data(), data.size(), data.data());
  }
  void broadcast(std::span<std::byte> data, int root) override {
    const auto all = hub_.gather(rank_, data);
    std::memcpy(data.data(), all[root].data(), data.size());
  }
  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override {
    calls.push_back("all to all");
    for (int to = 0; to < hub_.size(); ++to) {
      auto all = hub_.gather(rank_, mine[to]);
      if (to == rank_) theirs = std::move(all);
    }
  }
  void send_receive(int, std::span<const std::byte>, int, std::vector<std::byte>&) override {
    throw Error("the test's ranks have no send_receive");
  }
  void barrier() override { hub_.gather(rank_, {}); }
  std::unique_ptr<Communicator> split(int) override { throw Error("the test's ranks have no split"); }
  void abort(const std::string& reason) noexcept override { hub_.fail(reason); }

  std::vector<std::string> calls;  // in the order in which they were made

 private:
  template <class T>
  void sum(std::span<T> data) {
    const auto all = hub_.gather(rank_, std::as_bytes(data));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      for (std::size_t i = 0; i < data.size(); ++i) {
        T value;
        std::memcpy(&value, all[rank].data() + i * sizeof(T), sizeof(T));
        data[i] = rank == 0 ? value : data[i] + value;
      }
  }

  Hub& hub_;
  int rank_;
};

// Runs `body` as each rank, in a thread of its own, and rethrows the first error. Catch2's macros are not for
// threads: the body stores what the test then checks.
inline void run_ranks(int ranks, bool overlaps, const std::function<void(TestCommunicator&)>& body) {
  Hub hub(ranks);
  std::mutex mutex;
  std::exception_ptr first;
  errors_of_threads(ranks, [&](int rank) {
    TestCommunicator communicator(hub, rank, overlaps);
    try {
      body(communicator);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      communicator.abort(error.what());
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace topknot::testing
