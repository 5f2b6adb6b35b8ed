#pragma once
// The queue of a rank's collectives. Jobs run in the order of submit(), one at a time, so that two threads
// never use one communicator. They run on the queue's own thread if the communicator overlaps(), else inside
// submit(), on the caller's thread. Parallel loops in a job on the queue's thread run on that thread alone.
//
// After a job failed, later jobs do not run: waiting for them throws the first job's error. A queue belongs
// to one rank, whose compute thread calls submit() and wait().

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "dist/comm/communicator.h"
#include "nn/base/clock.h"

namespace topknot {

class CollectiveQueue {
 public:
  using Job = std::function<void(Communicator&)>;
  using Ticket = std::uint64_t;  // 1, 2, 3, ...

  // When a job ran, by the steady clock. `waited`: seconds that wait() blocked, or that submit() ran the job.
  struct Times {
    Clock::time_point begin, end;
    double seconds() const { return std::chrono::duration<double>(end - begin).count(); }
    double waited = 0;
  };

  explicit CollectiveQueue(Communicator& communicator);
  // Runs what is queued, or drops it after a failure and while an exception propagates (the running job ends
  // first; the handler of the exception calls abort()).
  ~CollectiveQueue();

  // For what it says of itself (rank, size, backend, overlaps); collectives go through the queue.
  const Communicator& communicator() const { return communicator_; }

  Ticket submit(Job job);
  // Returns when the job has run; rethrows its error, or an earlier one's first. Once for each ticket.
  Times wait(Ticket ticket);
  Times run(Job job) { return wait(submit(std::move(job))); }

 private:
  void work();
  void execute(Ticket ticket, const Job& job);

  Communicator& communicator_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::pair<Ticket, Job>> jobs_;
  std::map<Ticket, Times> finished_;
  Ticket submitted_ = 0, done_ = 0;
  std::exception_ptr error_;
  Ticket failed_ = 0;  // the job that threw error_
  bool stop_ = false;
  int exceptions_;  // in flight at construction
  std::thread worker_;
};

}  // namespace topknot
