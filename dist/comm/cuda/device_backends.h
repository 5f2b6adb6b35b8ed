#pragma once
// The two kinds of DeviceCommunicator, for make_device_communicator() and tests, and how they wait.

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/launch/socket.h"

namespace topknot::cuda {

// Ranks that are threads of this process on one GPU. They meet on the host at the beginning and at the end of each
// call, exchange pointers and events, and each rank's stream waits for the others' events: no kernel waits for
// another rank. Sums are in rank order, whatever SumOrder asks for: each rank adds one slice of every rank's memory
// and writes the sum to all of them. Collective; throws UserError where the ranks use different GPUs or are too many.
std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& host, double timeout_s);

// Ranks that are processes, one per GPU, over NCCL. Collective over `host`: NCCL's versions are compared, then rank 0's
// unique id is broadcast. NCCL runs non-blocking, and a thread watches the work on its streams: at the deadline,
// at an asynchronous error and as soon as the host's group has ended it aborts, so that no kernel and no host call
// waits for a dead peer without end. Throws UserError: versions that differ, ranks that share a GPU (NCCL cannot, unless
// NCCL_HOSTID tells it that they are on different hosts); CollectiveError: a peer did not come.
//
// SumOrder::ranks: slices go from all to all, each rank adds its slice of all ranks in rank order, and the sums are
// gathered; what does not divide by 16 times the ranks, and short arrays, are gathered and added by every rank.
std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& host, double timeout_s);

// Waiting for a GPU without blocking in a call of CUDA. Sleeps between looks: short ones at first, at most 2 ms, about 5 % of what has passed.
class PollingWait {
 public:
  void pause() const {
    const auto passed = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start_);
    std::this_thread::sleep_for(
        std::clamp(passed / 20, std::chrono::microseconds(10), std::chrono::microseconds(2000)));
  }

 private:
  Clock::time_point start_ = Clock::now();
};

}  // namespace topknot::cuda
