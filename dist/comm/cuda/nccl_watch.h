#pragma once
// A thread that watches the work on a rank's streams, since the host may be blocked in a call of CUDA that
// waits for a collective whose peer is dead.

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nn/base/program.h"

namespace topknot::cuda {

class Event;

class NcclWatch {
 public:
  // `problem`: polled a few times per second; "" or why the work will not end. `give_up` is called once, on
  // the watch's thread, with that reason or with the work that did not end within `timeout_s`. After a stop
  // signal, work that does not end is given up as StopGracePeriod says; `alive`: whether all peers are.
  NcclWatch(int device, double timeout_s, std::function<std::string()> problem, std::function<bool()> alive,
            std::function<void(const std::string&)> give_up);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  // The work on `stream` up to now, whose last part is `what`, must end within the timeout from now or from
  // the end of the work that was expected before it. Not during a capture.
  void expect(const std::string& what, cudaStream_t stream);
  // True if all expected work has ended.
  bool idle();
  // Pieces of expected work that have ended.
  std::uint64_t ended();

 private:
  struct Pending {
    std::unique_ptr<Event> event;
    std::string what;
  };
  void run();
  std::string look();
  void take_ended();

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
