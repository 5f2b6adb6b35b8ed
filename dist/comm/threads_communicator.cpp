// The `threads` backend: the ranks are threads of one process. In every collective all ranks enter a barrier,
// copy what they need out of each other's memory (of a sum each adds one slice and writes it to all), and
// leave the barrier. Sums are always in rank order, whatever SumOrder asks for. Operation, sequence number
// and, if lengths must agree, size are compared across ranks in every call.
//
// With an emulated link (dist.link) a collective takes the time that such a link would; only then is there
// something to wait for during the callers' computation, and overlaps() is true.
//
// A rank that does not come within the timeout, calls abort(), or destroys its communicator while others wait
// ends the others' calls with CollectiveError and the first reason; afterwards every call throws.

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "dist/comm/communicator.h"
#include "dist/comm/ordered_sum.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

// A rank's part of a collective. The memory stays valid until all ranks leave.
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

struct Member {
  int rank = 0;  // of the run
  int host = 0;
  std::string name() const { return fmt::format("rank {}", rank); }  // as messages call it
};

class RankGroup {
 public:
  // `begun`: when its ranks were, for a link that changes.
  RankGroup(std::vector<Member> members, double timeout_s, const std::optional<EmulatedLink>& link,
            Clock::time_point begun)
      : calls(members.size()),
        members_(std::move(members)),
        timeout_s_(timeout_s),
        link_(link),
        begun_(begun),
        here_(calls.size()),
        gone_(calls.size()) {}

  // Waits for all ranks. Throws when that can no longer happen.
  void enter_barrier(int rank, const Call& call) {
    std::unique_lock lock(mutex_);
    if (!reason_.empty()) fail(rank, call);
    for (std::size_t r = 0; r < gone_.size(); ++r)
      if (gone_[r]) {
        stop(static_cast<int>(r), members_[r].name() + " ended while the others went on");
        fail(rank, call);
      }
    calls[rank] = call;
    here_[rank] = true;
    if (++arrived_ == static_cast<int>(calls.size())) {
      check_calls();
      if (!reason_.empty()) fail(rank, call);
      entered_at = Clock::now();
      open();
      return;
    }
    const auto generation = generation_;
    const auto over = [&] { return generation_ != generation || !reason_.empty(); };
    Patience patience(timeout_s_);
    StopGracePeriod after_signal;
    while (!changed_.wait_for(lock, kPoll, over)) {
      if (patience.over())
        stop(rank,
             fmt::format("{}: {} gave up after dist.timeout_s ({:g} s): rank {} did not come; last calls: {}",
                         members_[rank].name(), text(call), timeout_s_, missing(), last_calls()));
      // The ranks are threads of this process: what is missing is busy, not lost.
      if (after_signal.ended(static_cast<std::uint64_t>(arrived_), true))
        stop(rank, fmt::format("{}: {} stopped by {} while waiting for rank {}; last calls: {}",
                               members_[rank].name(), text(call), signal_name(stop_signal()), missing(),
                               last_calls()));
    }
    // A barrier that all have entered counts, whatever happened since: the others rely on this rank's memory.
    if (generation_ != generation) return;
    fail(rank, call);
  }

  // For the end of a collective over the link: `seconds` after the last rank entered it.
  void arrive(int rank, const Call& call, Clock::time_point entered_at, double seconds) {
    constexpr double kLongest = 1e6;  // seconds; a clock's count is finite
    const Deadline at = entered_at + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(std::min(seconds, kLongest)));
    std::unique_lock lock(mutex_);
    if (timeout_s_ > 0 && seconds > timeout_s_)
      stop(rank, fmt::format("{}: {} takes {:.3g} s over the {}, more than dist.timeout_s ({:g} s)",
                             members_[rank].name(), text(call), seconds, link_->text, timeout_s_));
    // After a stop signal the run ends with this step, whose time matters no longer.
    while (reason_.empty() && stop_signal() == 0 && Clock::now() < at)
      changed_.wait_until(lock, std::min(at, Clock::now() + kPoll));
    // A collective whose time has passed has succeeded, even if the group failed since.
    if (!reason_.empty() && Clock::now() < at) fail(rank, call);
  }

  // Ends a collective. Between entering and leaving there is only finite work on memory, and a rank that left
  // early would take away memory in use, so neither deadline nor abort counts here.
  void leave_barrier() {
    std::unique_lock lock(mutex_);
    if (++arrived_ == static_cast<int>(calls.size())) return open();
    const auto generation = generation_;
    changed_.wait(lock, [&] { return generation_ != generation; });
  }

  // `rank`: of this group; -1: of a larger one.
  void abort(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    stop(rank, reason);
  }

  std::string reason() {
    const std::lock_guard lock(mutex_);
    return reason_;
  }
  // The rank that gave the reason, or -1.
  int first_rank() {
    const std::lock_guard lock(mutex_);
    return first_rank_;
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    gone_[rank] = true;
    if (arrived_ > 0 && reason_.empty())
      stop(rank, members_[rank].name() + " ended while the others went on");
  }

  // A split, which ends when this group does.
  void adopt(const std::shared_ptr<RankGroup>& split) {
    const std::lock_guard lock(mutex_);
    std::erase_if(splits_, [](const auto& known) { return known.expired(); });
    splits_.push_back(split);
    if (!reason_.empty()) split->abort(-1, reason_);
  }

  double timeout() const { return timeout_s_; }
  const Member& member(int rank) const { return members_[rank]; }
  RunRanks run_ranks() const {
    RunRanks ranks;
    for (const Member& member : members_) ranks.push_back(member.rank);
    return ranks;
  }
  const std::optional<EmulatedLink>& link() const { return link_; }
  Clock::time_point begun() const { return begun_; }
  // The link during the current collective, the same for all ranks; all 0 without an emulated link.
  Link link_now() const {
    return link_ ? link_->at(std::chrono::duration<double>(entered_at - begun_).count()) : Link();
  }

  // The ranks' current calls; read between entering and leaving the barrier.
  std::vector<Call> calls;
  Clock::time_point entered_at;  // when the last rank came

 private:
  void open() {
    arrived_ = 0;
    here_.assign(here_.size(), false);
    ++generation_;
    changed_.notify_all();
  }

  void stop(int rank, const std::string& reason) {
    if (reason_.empty()) {
      reason_ = reason.empty() ? "a rank gave up" : reason;
      first_rank_ = rank;
    }
    changed_.notify_all();
    for (const auto& split : splits_)
      if (const auto group = split.lock()) group->abort(-1, reason_);
  }

  [[noreturn]] void fail(int rank, const Call& call) const {
    const std::string me = members_[rank].name() + ": " + text(call);
    const std::string error =
        reason_.rfind(me, 0) == 0 ? reason_ : me + " was ended\nfirst error: " + reason_;
    if (stop_signal() != 0) throw Interrupted(error);
    throw CollectiveError(error);
  }

  void check_calls() {
    for (std::size_t r = 1; r < calls.size(); ++r)
      if (std::strcmp(calls[r].operation, calls[0].operation) != 0 ||
          calls[r].sequence != calls[0].sequence || (calls[0].same_size && calls[r].bytes != calls[0].bytes))
        return stop(-1, fmt::format("the ranks do not make the same calls: {} is in {}, {} in {}",
                                    members_[0].name(), text(calls[0]), members_[r].name(), text(calls[r])));
  }

  static std::string text(const Call& call) {
    return fmt::format("{} #{} of {} bytes{}", call.operation, call.sequence, call.bytes, call.place);
  }

  // Lists the last call that each rank entered.
  std::string last_calls() const {
    std::string list;
    for (std::size_t r = 0; r < calls.size(); ++r)
      list += fmt::format("{}{} #{}", list.empty() ? "" : ", ", members_[r].name(), calls[r].sequence);
    return list;
  }

  std::string missing() const {
    std::string list;
    for (std::size_t r = 0; r < here_.size(); ++r)
      if (!here_[r]) list += fmt::format("{}{}", list.empty() ? "" : ", ", members_[r].rank);
    return list;
  }

  const std::vector<Member> members_;
  const double timeout_s_;
  const std::optional<EmulatedLink> link_;
  const Clock::time_point begun_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<bool> here_, gone_;
  std::string reason_;
  int first_rank_ = -1;  // that gave it
  std::vector<std::weak_ptr<RankGroup>> splits_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(const std::shared_ptr<RankGroup>& group, int rank)
      : Communicator({rank, static_cast<int>(group->calls.size()), "threads", group->link().has_value(),
                      group->link() ? group->link()->text : "", group->run_ranks()}),
        group_(group),
        rank_(rank) {}
  ~ThreadCommunicator() override { group_->leave(rank_); }

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    run("all_gather", const_cast<std::byte*>(mine.data()), mine.size(), false, [&] {
      all.resize(size());
      std::size_t largest = 0;
      for (int r = 0; r < size(); ++r) {
        const auto* bytes = static_cast<const std::byte*>(group_->calls[r].data);
        all[r].assign(bytes, bytes + group_->calls[r].bytes);
        largest = std::max(largest, all[r].size());
      }
      return gather_cost(static_cast<double>(largest));
    });
  }

  void all_reduce(std::span<float> data, SumOrder order) override { reduce("all_reduce", data, order); }
  void all_reduce(std::span<BFloat16> data, SumOrder order) override {
    reduce("all_reduce of bfloat16", data, order);
  }

  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run("broadcast", data.data(), data.size(), true, [&] {
      if (rank_ != root && !data.empty()) std::memcpy(data.data(), group_->calls[root].data, data.size());
      return broadcast_cost(group_->link_now(), size(), static_cast<double>(data.size()));
    });
  }

  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override {
    TOPKNOT_CHECK(static_cast<int>(mine.size()) == size(), "all_to_all with one block per rank");
    run("all_to_all", const_cast<std::vector<std::byte>*>(mine.data()), mine.size_bytes(), true, [&] {
      theirs.resize(size());
      std::size_t sent = 0, received = 0;  // to and from others
      for (int r = 0; r < size(); ++r) {
        theirs[r] = static_cast<const std::vector<std::byte>*>(group_->calls[r].data)[rank_];
        if (r != rank_) sent += mine[r].size(), received += theirs[r].size();
      }
      return gather_cost(static_cast<double>(std::max(sent, received)) / std::max(1, size() - 1));
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
      const std::string problem = unmatched_partners(partners, run_ranks());
      if (!problem.empty()) throw CollectiveError(rank_name(rank_) + ": " + problem);
      theirs.clear();
      if (from >= 0) {
        const auto block = static_cast<const Part*>(group_->calls[from].data)->block;
        theirs.assign(block.begin(), block.end());
      }
      if (to < 0 && from < 0) return 0.0;
      const Link link = group_->link_now();
      return link.alpha + link.beta * static_cast<double>(std::max(mine.size(), theirs.size()));
    });
  }

  void barrier() override {
    run("barrier", nullptr, 0, true, [&] { return gather_cost(0); });
  }

  std::unique_ptr<Communicator> split(int color) override {
    // The lowest rank of each color makes its group, and keeps it alive until all have taken it.
    std::vector<int> colors(size());
    run("split", &color, sizeof color, true, [&] {
      for (int r = 0; r < size(); ++r) colors[r] = *static_cast<const int*>(group_->calls[r].data);
      return 0.0;
    });
    const int leader = static_cast<int>(std::find(colors.begin(), colors.end(), color) - colors.begin());
    const int place = static_cast<int>(std::count(colors.begin(), colors.begin() + rank_, color));
    std::shared_ptr<RankGroup> made;
    if (leader == rank_) {
      std::vector<Member> members;
      for (int r = 0; r < size(); ++r)
        if (colors[r] == color) members.push_back(group_->member(r));
      const bool one_host = std::all_of(members.begin(), members.end(),
                                        [&](const Member& m) { return m.host == members[0].host; });
      made = std::make_shared<RankGroup>(std::move(members), group_->timeout(),
                                         one_host ? std::nullopt : group_->link(), group_->begun());
      group_->adopt(made);
    }
    std::shared_ptr<RankGroup> mine;
    run("split", &made, sizeof made, true, [&] {
      mine = *static_cast<const std::shared_ptr<RankGroup>*>(group_->calls[leader].data);
      return 0.0;
    });
    return std::make_unique<ThreadCommunicator>(mine, place);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      group_->abort(rank_, published(reason));
    } catch (...) {
      // Out of memory; the others end at their deadline.
    }
  }

  std::string first_error() override { return group_->reason(); }

 private:
  // `body` moves the data, and returns the seconds that the collective takes over the link.
  void run(const char* operation, void* data, std::size_t bytes, bool same_size, const auto& body) {
    const Call call{operation, ++sequence_, data, bytes, same_size, place()};
    group_->enter_barrier(rank_, call);
    const Clock::time_point entered_at = group_->entered_at;
    double seconds = 0;
    std::exception_ptr error;
    try {
      seconds = body();
    } catch (...) {
      error = std::current_exception();  // the others still need this rank, to leave
    }
    group_->leave_barrier();
    if (error) std::rethrow_exception(error);
    if (seconds > 0) group_->arrive(rank_, call, entered_at, seconds);
  }

  double gather_cost(double bytes) const { return all_gather_cost(group_->link_now(), size(), bytes); }

  // Rank r adds slice r of all ranks and writes the sum to all of them, so no other memory is needed. Over a
  // link as gloo does it (dist/comm/gloo_collectives.cpp).
  template <class T>
  void reduce(const char* operation, std::span<T> data, SumOrder order) {
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
      const double bytes = static_cast<double>(data.size_bytes());
      return std::min(gather_cost(bytes), order == SumOrder::ranks
                                              ? ordered_all_reduce_cost(group_->link_now(), size(), bytes)
                                              : ring_all_reduce_cost(group_->link_now(), size(), bytes));
    });
  }

  std::shared_ptr<RankGroup> group_;
  const int rank_;
  std::uint64_t sequence_ = 0;
};

std::shared_ptr<RankGroup> make_group(int ranks, double timeout_s, const std::optional<EmulatedLink>& link) {
  TOPKNOT_CHECK(ranks >= 1, "a group needs a rank");
  std::vector<Member> members;
  for (int r = 0; r < ranks; ++r) members.push_back({r, link ? r / link->ranks_per_host : r});
  return std::make_shared<RankGroup>(std::move(members), timeout_s, link, Clock::now());
}

std::vector<std::unique_ptr<Communicator>> communicators_of(const std::shared_ptr<RankGroup>& group) {
  std::vector<std::unique_ptr<Communicator>> result;
  for (std::size_t r = 0; r < group->calls.size(); ++r)
    result.push_back(std::make_unique<ThreadCommunicator>(group, static_cast<int>(r)));
  return result;
}

const bool threads_communicator_registered =
    backends().add("threads", "ranks are threads of one process; needs nothing", {.needs = "nothing"});

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks, double timeout_s,
                                                             const std::optional<EmulatedLink>& link) {
  return communicators_of(make_group(ranks, timeout_s, link));
}

void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body,
                      const std::optional<EmulatedLink>& link) {
  const auto shared = make_group(ranks, timeout_s, link);
  auto group = communicators_of(shared);
  std::mutex mutex;
  std::exception_ptr first, not_started;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  const auto run = [&](int r) {
    const auto failed = [&] {
      const std::lock_guard lock(mutex);
      errors[static_cast<std::size_t>(r)] = std::current_exception();
      if (!first) first = std::current_exception();
    };
    try {
      body(*group[r]);
      group[r].reset();
    } catch (const std::exception& error) {
      failed();
      try {
        group[r]->abort(explain(error));
      } catch (const std::bad_alloc&) {  // memory has run out: too little for the text
        group[r]->abort({});
      }
    } catch (...) {
      failed();
      group[r]->abort("an unknown error");
    }
  };
  try {
    for (int r = 0; r < ranks; ++r) threads.emplace_back(run, r);
  } catch (const std::system_error& error) {
    not_started = std::make_exception_ptr(UserError(fmt::format(
        "no thread can be started for rank {} of {} ({}); raise the limit (ulimit -u), or lower dist.ranks",
        threads.size(), ranks, error.code().message())));
    group[0]->abort("a rank could not be started");
  }
  for (auto& thread : threads) thread.join();
  if (not_started) std::rethrow_exception(not_started);
  // Throws the first error, not an error that it caused on another rank and that was caught earlier.
  if (const int cause = shared->first_rank(); cause >= 0 && errors[static_cast<std::size_t>(cause)])
    std::rethrow_exception(errors[static_cast<std::size_t>(cause)]);
  if (first) std::rethrow_exception(first);
}

}  // namespace topknot
