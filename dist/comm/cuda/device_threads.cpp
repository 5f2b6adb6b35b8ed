#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/comm/ordered_sum.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

// The barrier by which the ranks leave a call. Before it there is only finite work of the host, and a rank
// that left early could free memory that another's kernel will use: so abort() has no effect here.
class Barrier {
 public:
  explicit Barrier(int ranks) : ranks_(ranks) {}
  bool wait(Patience patience) {
    std::unique_lock lock(mutex_);
    if (++arrived_ == ranks_) {
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
      return true;
    }
    const auto generation = generation_;
    while (
        !changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return generation_ != generation; }))
      if (patience.over()) return false;
    return true;
  }

 private:
  const int ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  std::uint64_t generation_ = 0;
};

// The state that the ranks share. It outlives the last rank, since each rank waits for the others' events.
struct RankGroup {
  explicit RankGroup(int ranks) : left(ranks), ready(ranks), done(ranks) {}
  Barrier left;
  std::vector<std::unique_ptr<Event>> ready, done;  // by rank
};

enum class Operation : std::int32_t { gather, sum, sum_bfloat16, broadcast };

struct Part {
  Operation operation;
  std::int32_t root = -1;
  void* data = nullptr;
  std::uint64_t size = 0;
};
static_assert(std::is_trivially_copyable_v<Part>);

class DeviceThreads : public DeviceCommunicator {
 public:
  DeviceThreads(Communicator& host, double timeout_s) : host_(host), timeout_s_(timeout_s) {
    if (size() > kMostThreadRanks)
      throw UserError(
          fmt::format("dist.ranks: at most {} ranks of dist.backend threads can share a GPU, not {}",
                      kMostThreadRanks, size()));
    const int device = Context::current().options().device;
    const auto made = rank() == 0 ? std::make_shared<RankGroup>(size()) : nullptr;
    struct Hello {
      int device;
      const std::shared_ptr<RankGroup>* group;
    };
    const auto all = exchange(Hello{device, &made});
    for (int r = 1; r < size(); ++r)
      if (all[static_cast<std::size_t>(r)].device != all[0].device)
        throw UserError(fmt::format(
            "ranks that are threads of one process share one GPU, but {} is on GPU {} and {} on GPU "
            "{}; use dist.backend=nccl for several GPUs",
            host_.rank_name(0), all[0].device, host_.rank_name(r), all[static_cast<std::size_t>(r)].device));
    group_ = *all[0].group;
    mine(group_->ready) = std::make_unique<Event>();
    mine(group_->done) = std::make_unique<Event>();
    host_.barrier();  // all events are there, and all have copied rank 0's pointer
  }

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string backend() const override { return "threads"; }
  bool capturable() const override { return false; }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    run({Operation::gather, -1, const_cast<std::byte*>(mine), bytes}, stream,
        [&](const std::vector<Part>& parts) { gather_blocks(stream, pointers(parts), size(), bytes, all); });
  }

  // Rank r adds slice r of all ranks and writes it to all: no rank reads what another rank writes.
  void all_reduce(DType type, void* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    const auto operation = type == DType::f32 ? Operation::sum : Operation::sum_bfloat16;
    run({operation, -1, data, n}, stream, [&](const std::vector<Part>& parts) {
      const ElementRange slice = slice_of(n, size(), rank());
      ordered_sum_to_all(stream, type, pointers(parts), size(), slice.begin, slice.size());
    });
  }

  void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run({Operation::broadcast, root, data, bytes}, stream, [&](const std::vector<Part>& parts) {
      if (rank() != root && bytes > 0)
        TOPKNOT_CUDA(cudaMemcpyAsync(data, parts[static_cast<std::size_t>(root)].data, bytes,
                                     cudaMemcpyDeviceToDevice, stream));
    });
  }

  std::unique_ptr<DeviceCommunicator> split(Communicator& host) override {
    return std::make_unique<DeviceThreads>(host, timeout_s_);
  }

  void wait(cudaStream_t stream) override {
    Patience patience(timeout_s_);
    StopGracePeriod after_signal;
    const PollingWait wait;
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream);
      if (status == cudaSuccess) return;
      if (status != cudaErrorNotReady) check_cuda(status, "cudaStreamQuery", __FILE__, __LINE__);
      cudaGetLastError();  // not ready is no error
      if (patience.over())
        throw CollectiveError(fmt::format("{}: the GPU did not end its work within dist.timeout_s ({} s)",
                                          me(), short_text(timeout_s_)));
      if (after_signal.ended(0, true))
        throw Interrupted(
            fmt::format("{}: stopped by {} while waiting for the GPU", me(), signal_name(stop_signal())));
      wait.pause();
    }
  }

  void abort(const std::string& reason) noexcept override { host_.abort(reason); }

 private:
  std::string me() const { return host_.rank_name(rank()); }

  template <class T>
  std::vector<T> exchange(const T& mine) {
    std::vector<std::vector<std::byte>> bytes;
    host_.all_gather(std::as_bytes(std::span(&mine, 1)), bytes);
    std::vector<T> all(bytes.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (bytes[r].size() != sizeof(T))
        throw CollectiveError(fmt::format("{}: {} makes another call, not a collective on the GPU", me(),
                                          host_.rank_name(static_cast<int>(r))));
      std::memcpy(&all[r], bytes[r].data(), sizeof(T));
    }
    return all;
  }

  static RankPointers pointers(const std::vector<Part>& parts) {
    RankPointers result;
    for (std::size_t r = 0; r < parts.size(); ++r) result.at[r] = parts[r].data;
    return result;
  }

  void run(const Part& part, cudaStream_t stream, const auto& body) {
    mine(group_->ready)->record(stream);
    const std::vector<Part> parts = exchange(part);
    std::exception_ptr error;
    try {
      for (std::size_t r = 1; r < parts.size(); ++r)
        if (parts[r].operation != parts[0].operation || parts[r].size != parts[0].size ||
            parts[r].root != parts[0].root)
          throw CollectiveError(fmt::format("{}: the ranks do not make the same calls: {} is in {}, {} in {}",
                                            me(), host_.rank_name(0), text(parts[0]),
                                            host_.rank_name(static_cast<int>(r)), text(parts[r])));
      wait_for_others(group_->ready, stream);
      body(parts);
      mine(group_->done)->record(stream);
    } catch (...) {
      error = std::current_exception();  // the others still need this rank, to leave
    }
    const bool left = group_->left.wait(Patience(timeout_s_));
    if (error) std::rethrow_exception(error);
    if (!left)
      throw CollectiveError(
          fmt::format("{}: {} gave up after dist.timeout_s ({} s): a rank stayed away from its end", me(),
                      text(part), short_text(timeout_s_)));
    // No rank continues before all have read its memory.
    wait_for_others(group_->done, stream);
  }

  std::unique_ptr<Event>& mine(std::vector<std::unique_ptr<Event>>& events) const {
    return events[static_cast<std::size_t>(rank())];
  }
  void wait_for_others(const std::vector<std::unique_ptr<Event>>& events, cudaStream_t stream) const {
    for (int r = 0; r < size(); ++r)
      if (r != rank()) events[static_cast<std::size_t>(r)]->wait(stream);
  }

  std::string text(const Part& part) const {
    switch (part.operation) {
      case Operation::gather:
        return fmt::format("all_gather of {} bytes on the GPU", part.size);
      case Operation::sum:
        return fmt::format("all_reduce of {} floats on the GPU", part.size);
      case Operation::sum_bfloat16:
        return fmt::format("all_reduce of {} bfloat16 on the GPU", part.size);
      case Operation::broadcast:
        break;
    }
    return fmt::format("broadcast of {} bytes from {} on the GPU", part.size, host_.rank_name(part.root));
  }

  Communicator& host_;
  const double timeout_s_;
  std::shared_ptr<RankGroup> group_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& host, double timeout_s) {
  return std::make_unique<DeviceThreads>(host, timeout_s);
}

}  // namespace topknot::cuda
