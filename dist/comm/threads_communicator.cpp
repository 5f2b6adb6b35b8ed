#include "dist/comm/threads_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "dist/comm/backend.h"
#include "dist/comm/ordered_sum.h"
#include "dist/launch/socket.h"
#include "dist/launch/stop_wait.h"
#include "nn/core/base/program.h"

namespace topknot {
namespace {

// A rank's part of a collective. The memory stays valid until the second meeting.
struct Call {
  const char* operation = "";
  std::uint64_t sequence = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
  bool same_size = true;
  std::string place = {};  // as Communicator::place()
};

// How often a wait looks for a stop signal.
constexpr auto kPoll = std::chrono::milliseconds(100);

class Group {
 public:
  // `names`: how messages call the ranks.
  Group(std::vector<std::string> names, double timeout_s)
      : calls(names.size()),
        names_(std::move(names)),
        timeout_s_(timeout_s),
        here_(calls.size()),
        gone_(calls.size()) {}

  // Waits for all ranks. Throws when that can no longer happen.
  void meet(int rank, const Call& call) {
    std::unique_lock lock(mutex_);
    if (!reason_.empty()) fail(rank, call);
    for (std::size_t r = 0; r < gone_.size(); ++r)
      if (gone_[r]) {
        stop(names_[r] + " ended while the others went on");
        fail(rank, call);
      }
    calls[rank] = call;
    here_[rank] = true;
    if (++arrived_ == static_cast<int>(calls.size())) {
      check_calls();
      if (!reason_.empty()) fail(rank, call);
      open();
      return;
    }
    const auto generation = generation_;
    const Deadline deadline = deadline_in(timeout_s_);
    const auto over = [&] { return generation_ != generation || !reason_.empty(); };
    StopPatience patience;
    while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kPoll), over)) {
      if (Clock::now() >= deadline)
        stop(fmt::format("{}: {} gave up after dist.timeout_s ({:g} s): rank {} did not come; last calls: {}",
                         names_[rank], text(call), timeout_s_, missing(), last_calls()));
      // The ranks are threads of this process: what is missing is busy, not lost.
      if (patience.ended(static_cast<std::uint64_t>(arrived_), true))
        stop(fmt::format("{}: {} stopped by {} while waiting for rank {}; last calls: {}", names_[rank],
                         text(call), signal_name(stop_signal()), missing(), last_calls()));
    }
    // A meeting that took place counts, whatever happened since: the others rely on this rank's memory.
    if (generation_ != generation) return;
    fail(rank, call);
  }

  // Ends a collective. Between the two meetings there is only finite work on memory, and a rank that left
  // early would take away memory in use, so neither deadline nor abort counts here.
  void part() {
    std::unique_lock lock(mutex_);
    if (++arrived_ == static_cast<int>(calls.size())) return open();
    const auto generation = generation_;
    changed_.wait(lock, [&] { return generation_ != generation; });
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    stop(reason);
  }

  std::string reason() {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    gone_[rank] = true;
    if (arrived_ > 0 && reason_.empty()) stop(names_[rank] + " ended while the others went on");
  }

  // A split, which ends when this group does.
  void adopt(const std::shared_ptr<Group>& split) {
    const std::lock_guard lock(mutex_);
    std::erase_if(splits_, [](const auto& known) { return known.expired(); });
    splits_.push_back(split);
    if (!reason_.empty()) split->abort(reason_);
  }

  double timeout() const { return timeout_s_; }
  const std::string& name(int rank) const { return names_[rank]; }

  std::vector<Call> calls;  // of the current collective; read between its meetings

 private:
  void open() {
    arrived_ = 0;
    here_.assign(here_.size(), false);
    ++generation_;
    changed_.notify_all();
  }

  void stop(const std::string& reason) {
    if (reason_.empty()) reason_ = reason.empty() ? "a rank gave up" : reason;
    changed_.notify_all();
    for (const auto& split : splits_)
      if (const auto group = split.lock()) group->abort(reason_);
  }

  [[noreturn]] void fail(int rank, const Call& call) const {
    const std::string me = names_[rank] + ": " + text(call);
    const std::string error =
        reason_.rfind(me, 0) == 0 ? reason_ : me + " was ended\nfirst error: " + reason_;
    if (stop_signal() != 0) throw Interrupted(error);
    throw CollectiveError(error);
  }

  void check_calls() {
    for (std::size_t r = 1; r < calls.size(); ++r)
      if (std::strcmp(calls[r].operation, calls[0].operation) != 0 ||
          calls[r].sequence != calls[0].sequence || (calls[0].same_size && calls[r].bytes != calls[0].bytes))
        return stop(fmt::format("the ranks do not make the same calls: rank 0 is in {}, rank {} in {}",
                                text(calls[0]), r, text(calls[r])));
  }

  static std::string text(const Call& call) {
    return fmt::format("{} #{} of {} bytes{}", call.operation, call.sequence, call.bytes, call.place);
  }

  // Of each rank the last one in which it came.
  std::string last_calls() const {
    std::string list;
    for (std::size_t r = 0; r < calls.size(); ++r)
      list += fmt::format("{}rank {} #{}", list.empty() ? "" : ", ", r, calls[r].sequence);
    return list;
  }

  std::string missing() const {
    std::string list;
    for (std::size_t r = 0; r < here_.size(); ++r)
      if (!here_[r]) list += fmt::format("{}{}", list.empty() ? "" : ", ", r);
    return list;
  }

  const std::vector<std::string> names_;
  const double timeout_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<bool> here_, gone_;
  std::string reason_;
  std::vector<std::weak_ptr<Group>> splits_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  ~ThreadCommunicator() override { group_->leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->calls.size()); }
  std::string backend() const override { return "threads"; }
  bool overlaps() const override { return false; }

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    run("all_gather", const_cast<std::byte*>(mine.data()), mine.size(), false, [&] {
      all.resize(size());
      for (int r = 0; r < size(); ++r) {
        const auto* bytes = static_cast<const std::byte*>(group_->calls[r].data);
        all[r].assign(bytes, bytes + group_->calls[r].bytes);
      }
    });
  }

  void all_reduce(std::span<float> data, SumOrder) override { reduce("all_reduce", data); }
  void all_reduce(std::span<BFloat16> data, SumOrder) override { reduce("all_reduce of bfloat16", data); }
  void all_reduce(std::span<double> data) override { reduce("all_reduce of doubles", data); }

  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run("broadcast", data.data(), data.size(), true, [&] {
      if (rank_ != root && !data.empty()) std::memcpy(data.data(), group_->calls[root].data, data.size());
    });
  }

  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override {
    TOPKNOT_CHECK(static_cast<int>(mine.size()) == size(), "all_to_all with one block per rank");
    run("all_to_all", const_cast<std::vector<std::byte>*>(mine.data()), mine.size_bytes(), true, [&] {
      theirs.resize(size());
      for (int r = 0; r < size(); ++r)
        theirs[r] = static_cast<const std::vector<std::byte>*>(group_->calls[r].data)[rank_];
    });
  }

  void send_receive(int to, std::span<const std::byte> mine, int from,
                    std::vector<std::byte>& theirs) override {
    TOPKNOT_CHECK(to >= -1 && to < size() && to != rank_ && from >= -1 && from < size() && from != rank_,
                  "send_receive with a rank that does not exist, or with itself");
    struct Part {
      std::span<const std::byte> block;
      int to, from;
    } part{mine, to, from};
    run("send_receive", &part, sizeof part, true, [&] {
      std::vector<std::pair<int, int>> partners;
      for (const Call& call : group_->calls) {
        const auto* other = static_cast<const Part*>(call.data);
        partners.emplace_back(other->to, other->from);
      }
      const std::string problem = unmatched_partners(partners);
      if (!problem.empty()) throw CollectiveError(group_->name(rank_) + ": " + problem);
      theirs.clear();
      if (from < 0) return;
      const auto block = static_cast<const Part*>(group_->calls[from].data)->block;
      theirs.assign(block.begin(), block.end());
    });
  }

  void barrier() override {
    run("barrier", nullptr, 0, true, [] {});
  }

  std::unique_ptr<Communicator> split(int color) override {
    // The lowest rank of each color makes its group, and keeps it alive until all have taken it.
    std::vector<int> colors(size());
    run("split", &color, sizeof color, true, [&] {
      for (int r = 0; r < size(); ++r) colors[r] = *static_cast<const int*>(group_->calls[r].data);
    });
    const int leader = static_cast<int>(std::find(colors.begin(), colors.end(), color) - colors.begin());
    const int place = static_cast<int>(std::count(colors.begin(), colors.begin() + rank_, color));
    std::shared_ptr<Group> made;
    if (leader == rank_) {
      std::vector<std::string> names;
      for (int r = 0; r < size(); ++r)
        if (colors[r] == color)
          names.push_back(fmt::format("{} ({} of its split)", group_->name(r), names.size()));
      made = std::make_shared<Group>(std::move(names), group_->timeout());
      group_->adopt(made);
    }
    std::shared_ptr<Group> mine;
    run("split", &made, sizeof made, true,
        [&] { mine = *static_cast<const std::shared_ptr<Group>*>(group_->calls[leader].data); });
    return std::make_unique<ThreadCommunicator>(std::move(mine), place);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      group_->abort(reason.rfind("rank ", 0) == 0 ? reason : group_->name(rank_) + ": " + reason);
    } catch (...) {
      // Out of memory; the others end at their deadline.
    }
  }

  std::string first_error() override { return group_->reason(); }

 private:
  template <class Body>
  void run(const char* operation, void* data, std::size_t bytes, bool same_size, const Body& body) {
    group_->meet(rank_, {operation, ++sequence_, data, bytes, same_size, place()});
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();  // the others still need this rank at the second meeting
    }
    group_->part();
    if (error) std::rethrow_exception(error);
  }

  // Rank r adds slice r of all ranks and writes the sum to all of them, so no other memory is needed.
  template <class T>
  void reduce(const char* operation, std::span<T> data) {
    run(operation, data.data(), data.size_bytes(), true, [&] {
      const ElementRange slice = slice_of(data.size(), size(), rank_);
      std::vector<const T*> sources(size());
      for (int r = 0; r < size(); ++r)
        sources[r] = static_cast<const T*>(group_->calls[r].data) + slice.begin;
      ordered_sum(std::span<const T* const>(sources), data.data() + slice.begin, slice.size());
      for (int r = 0; r < size(); ++r)
        if (r != rank_ && slice.size() > 0)
          std::copy_n(data.data() + slice.begin, slice.size(),
                      static_cast<T*>(group_->calls[r].data) + slice.begin);
    });
  }

  std::shared_ptr<Group> group_;
  int rank_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks, double timeout_s) {
  TOPKNOT_CHECK(ranks >= 1, "a group needs a rank");
  std::vector<std::string> names;
  for (int r = 0; r < ranks; ++r) names.push_back(fmt::format("rank {}", r));
  const auto group = std::make_shared<Group>(std::move(names), timeout_s);
  std::vector<std::unique_ptr<Communicator>> result;
  for (int r = 0; r < ranks; ++r) result.push_back(std::make_unique<ThreadCommunicator>(group, r));
  return result;
}

void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body) {
  auto group = make_thread_group(ranks, timeout_s);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  const auto run = [&](int r) {
    std::string reason = "an unknown error";
    try {
      body(*group[r]);
      group[r].reset();
      return;
    } catch (const std::exception& error) {
      reason = explain(error);
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    group[r]->abort(reason);
  };
  try {
    for (int r = 0; r < ranks; ++r) threads.emplace_back(run, r);
  } catch (const std::system_error& error) {
    {
      const std::lock_guard lock(mutex);
      first = std::make_exception_ptr(UserError(fmt::format(
          "no thread can be started for rank {} of {} ({}); raise the limit (ulimit -u), or lower dist.ranks",
          threads.size(), ranks, error.code().message())));
    }
    group[0]->abort("a rank could not be started");
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

namespace {

const bool threads_communicator_registered =
    (backends().add("threads", "ranks are threads of one process; needs nothing", {.needs = "nothing"}),
     true);

}  // namespace

}  // namespace topknot
