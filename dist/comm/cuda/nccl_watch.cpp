#include "dist/comm/cuda/nccl_watch.h"

#include <algorithm>

#include "nn/base/text.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

NcclWatch::NcclWatch(int device, double timeout_s, std::function<std::string()> problem,
                     std::function<bool()> alive, std::function<void(const std::string&)> give_up)
    : device_(device),
      timeout_s_(timeout_s),
      problem_(std::move(problem)),
      alive_(std::move(alive)),
      give_up_(std::move(give_up)),
      thread_([this] { run(); }) {}

NcclWatch::~NcclWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void NcclWatch::expect(const std::string& what, cudaStream_t stream) {
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

bool NcclWatch::idle() {
  const std::lock_guard lock(mutex_);
  take_ended();
  return pending_.empty();
}

std::uint64_t NcclWatch::ended() {
  const std::lock_guard lock(mutex_);
  take_ended();
  return ended_;
}

// Streams may run concurrently, so any of them may have ended; the first is the oldest.
void NcclWatch::take_ended() {
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

std::string NcclWatch::look() {
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

void NcclWatch::run() {
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

}  // namespace topknot::cuda
