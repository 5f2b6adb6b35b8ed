#include "dist/comm/collective_queue.h"

#include "nn/base/program.h"
#include "nn/core/threads.h"

namespace topknot {

CollectiveQueue::CollectiveQueue(Communicator& communicator)
    : communicator_(communicator), exceptions_(std::uncaught_exceptions()) {
  if (!communicator_.overlaps()) return;
  worker_ = std::thread([this] {
    set_team_size(1);  // a second team would slow the first one's barriers (nn/core/threads.h)
    work();
  });
}

CollectiveQueue::~CollectiveQueue() {
  if (!worker_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (std::uncaught_exceptions() > exceptions_) jobs_.clear();
  }
  changed_.notify_all();
  worker_.join();
}

CollectiveQueue::Ticket CollectiveQueue::submit(Job job) {
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket = ++submitted_;
    if (worker_.joinable()) jobs_.emplace_back(ticket, std::move(job));
  }
  if (worker_.joinable())
    changed_.notify_all();
  else
    execute(ticket, job);
  return ticket;
}

CollectiveQueue::Times CollectiveQueue::wait(Ticket ticket) {
  const auto begin = Clock::now();
  std::unique_lock lock(mutex_);
  TOPKNOT_CHECK(ticket >= 1 && ticket <= submitted_, "waiting for a collective that was not submitted");
  changed_.wait(lock, [&] { return done_ >= ticket; });
  if (error_ && ticket >= failed_) std::rethrow_exception(error_);
  const auto found = finished_.find(ticket);
  TOPKNOT_CHECK(found != finished_.end(), "waiting twice for one collective");
  Times times = found->second;
  finished_.erase(found);
  times.waited =
      worker_.joinable() ? std::chrono::duration<double>(Clock::now() - begin).count() : times.seconds();
  return times;
}

void CollectiveQueue::execute(Ticket ticket, const Job& job) {
  bool skip;
  {
    const std::lock_guard lock(mutex_);
    skip = error_ != nullptr;
  }
  Times times;
  std::exception_ptr error;
  times.begin = Clock::now();
  if (!skip) {
    try {
      job(communicator_);
    } catch (const CollectiveError& collective) {
      // At once: during unwinding, its splits would report no reason to their other ranks.
      communicator_.abort(collective.what());
      error = std::current_exception();
    } catch (const Interrupted& interrupted) {
      communicator_.abort(interrupted.what());
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
  }
  times.end = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (error) {
      error_ = error;
      failed_ = ticket;
    } else if (!skip) {
      finished_[ticket] = times;
    }
    done_ = ticket;
  }
  changed_.notify_all();
}

void CollectiveQueue::work() {
  for (;;) {
    std::pair<Ticket, Job> next;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      next = std::move(jobs_.front());
      jobs_.pop_front();
    }
    execute(next.first, next.second);
  }
}

}  // namespace topknot
