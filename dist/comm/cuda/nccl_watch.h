#pragma once
// A thread that watches the work on a rank's streams: the host may be blocked in CUDA, for a dead peer.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

class NcclWatch {
 public:
  // `problem`: polled a few times per second; "" or why the work will not end. `give_up` is called once, on
  // the watch's thread, with that reason or with the work that did not end within `timeout_s`. After a stop
  // signal, work that does not end is given up as StopGracePeriod says; `alive`: whether all peers are.
  NcclWatch(int device, double timeout_s, std::function<std::string()> problem, std::function<bool()> alive,
            std::function<void(const std::string&)> give_up)
      : device_(device),
        timeout_s_(timeout_s),
        problem_(std::move(problem)),
        alive_(std::move(alive)),
        give_up_(std::move(give_up)),
        thread_([this] { run(); }) {}
  ~NcclWatch() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // The work on `stream` up to now, whose last part is `what`, must end within the timeout from now or from
  // the end of the work that was expected before it. Not during a capture.
  void expect(const std::string& what, cudaStream_t stream) {
    std::unique_ptr<Event> event;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = std::move(free_.back());
        free_.pop_back();
      }
    }
    // Not under the lock: with a full stream this waits for the GPU.
    if (!event) event = std::make_unique<Event>();
    event->record(stream);
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) patience_ = Patience(timeout_s_);
    pending_.push_back({std::move(event), what});
  }
  // True if all expected work has ended.
  bool idle() {
    const std::lock_guard lock(mutex_);
    take_ended();
    return pending_.empty();
  }
  // Pieces of expected work that have ended.
  std::uint64_t ended() {
    const std::lock_guard lock(mutex_);
    take_ended();
    return ended_;
  }

 private:
  struct Pending {
    std::unique_ptr<Event> event;
    std::string what;
  };
  void run() {
    // A look from here must not end a capture in another thread.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaSetDevice(device_);
    const auto pause = timeout_s_ > 0
                           ? std::chrono::milliseconds(std::clamp(static_cast<int>(timeout_s_ * 50), 10, 200))
                           : std::chrono::milliseconds(200);
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, pause, [&] { return stop_; })) {
      lock.unlock();
      const std::string why = look();
      if (!why.empty()) return give_up_(why);
      lock.lock();
    }
  }
  std::string look() {
    if (const std::string why = problem_(); !why.empty()) return why;
    const bool alive = stop_signal() == 0 || alive_();
    const std::lock_guard lock(mutex_);
    take_ended();
    if (pending_.empty()) {
      after_signal_ = {};
      return "";
    }
    const Pending& oldest = pending_.front();
    const bool over = patience_.over();
    if (after_signal_.ended(ended_, alive))
      return oldest.what + " stopped by " + signal_name(stop_signal()) + " while waiting for a peer";
    const cudaError_t status = cudaEventQuery(oldest.event->get());
    if (status != cudaSuccess && status != cudaErrorNotReady)
      return oldest.what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
             ")\nthe GPU is lost to this process; see the kernel's log (dmesg) for an Xid line";
    if (!over) return "";
    return oldest.what + " gave up after dist.timeout_s (" + short_text(timeout_s_) +
           " s): a peer did not come, or the GPU hangs";
  }
  // Streams may run concurrently, so any of them may have ended; the first is the oldest.
  void take_ended() {
    const std::uint64_t before = ended_;
    while (!pending_.empty() && cudaEventQuery(pending_.front().event->get()) == cudaSuccess) {
      free_.push_back(std::move(pending_.front().event));
      pending_.pop_front();
      ++ended_;
    }
    if (pending_.empty()) return;
    cudaGetLastError();  // not ready is no error
    if (ended_ != before) patience_ = Patience(timeout_s_);
  }

  const int device_;
  const double timeout_s_;
  const std::function<std::string()> problem_;
  const std::function<bool()> alive_;
  const std::function<void(const std::string&)> give_up_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pending> pending_;
  std::vector<std::unique_ptr<Event>> free_;
  std::uint64_t ended_ = 0;
  Patience patience_;  // for the oldest
  StopGracePeriod after_signal_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace topknot::cuda
