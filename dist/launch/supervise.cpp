#include "dist/launch/supervise.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "nn/base/log.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

constexpr auto kSameRequest = std::chrono::milliseconds(100);  // as install_stop_handlers()
// For the ranks to end after one of them gave up its waiting, or after a second stop signal.
constexpr double kLastWordsSeconds = 0.3;
// For other ranks that die with one, until the rest goes on.
constexpr double kMoreDeathsSeconds = 0.1;

bool is_stop_signal(int signal) {
  return std::count(std::begin(kStopSignals), std::end(kStopSignals), signal) > 0;
}

// A rank that ended other than with exit code 0.
struct Failure : Ending {
  bool killed = false;  // by a signal that did not come from here, or because it hung
  // By a stop signal that it alone was sent: kLeaves after a step, else as any program.
  bool left(bool all_stop = false) const {
    return signal == 0 && (code == kLeaves || (!all_stop && is_stop_signal(code - 128)));
  }
  // Not a fault that others may have too.
  bool lone(bool all_stop) const { return killed || left(all_stop); }
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
  std::string text() const {
    if (!why.empty()) return fmt::format("rank {} {}", rank, why);
    if (left()) return fmt::format("rank {} left", rank);
    if (signal == 0) return fmt::format("rank {} ended with exit code {}", rank, code);
    return fmt::format("rank {} died: killed by signal {} ({})", rank, signal, strsignal(signal));
  }
};

// What caused the others: of a rank that was killed, else of that with the first reason, else the first.
const Failure& cause(const std::vector<Failure>& failures, int first_rank) {
  auto found = std::ranges::find(failures, true, &Failure::killed);
  if (found == failures.end()) found = std::ranges::find(failures, first_rank, &Failure::rank);
  return found == failures.end() ? failures.front() : *found;
}

}  // namespace

std::string random_token() {
  unsigned char bytes[16];
  TOPKNOT_CHECK(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "no random bytes could be had");
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

SignalGate::SignalGate() {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &standard, &child_before_);
  sigemptyset(&taken_);
  sigaddset(&taken_, SIGCHLD);
  for (const int signal : kStopSignals) sigaddset(&taken_, signal);
  pthread_sigmask(SIG_BLOCK, &taken_, &before_);
}

SignalGate::~SignalGate() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  sigaction(SIGCHLD, &child_before_, nullptr);
}

int SignalGate::next(std::chrono::milliseconds timeout) const {
  const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
  const int signal = sigtimedwait(&taken_, nullptr, &time);
  return signal > 0 ? signal : 0;
}

int supervise(Ranks& ranks, ViewServer& views, const SignalGate& gate, const DistOptions& options,
              double grace_s) {
  std::vector<Failure> failures;  // in the order in which they were seen
  bool failed = false;            // and the ranks were told of the first one
  int stopping = 0;               // the signal that was passed on: ranks may end with a code of their own
  Clock::time_point stopped_at;   // when
  bool killing = false;
  std::string hanging;  // the message about a rank that goes on after the others
  // For ranks that end in order: they may have something to write; 0 is no limit.
  const double in_order = options.timeout_s > 0 ? std::max(grace_s, options.timeout_s) : 0;
  std::optional<Patience> terminate, kill;  // until SIGTERM and SIGKILL
  const auto sooner = [](std::optional<Patience>& limit, double seconds) {
    if (!limit || !limit->limited() || limit->left() > seconds) limit.emplace(seconds);
  };
  // Of an elastic run: ranks that the others are to go on without, and until then; ranks that are done.
  std::vector<Failure> lost;
  std::optional<Patience> regroup;
  int done = 0;
  std::vector<int> gone;     // ranks that died and may be started again
  std::optional<int> guest;  // the one that is there again and has not joined yet
  Patience guest_patience(0);
  std::map<int, std::string> hung;  // ranks that were killed for it
  const auto is_missing = [&](int rank) {
    const std::vector<int> missing = views.missing();
    return std::count(missing.begin(), missing.end(), rank) > 0;
  };
  const auto go_on = [&] {
    regroup.reset();
    std::vector<int> left = views.ranks();
    const std::vector<int> running = ranks.running();
    std::erase_if(left, [&](int rank) { return rank == guest || std::ranges::count(running, rank) == 0; });
    // A rank ends in order after all have agreed that the run is done.
    if ((done == 0 && static_cast<int>(left.size()) < options.min_ranks) || !failures.empty()) {
      failures.insert(failures.begin(), lost.begin(), lost.end());
    } else {
      std::string reason;
      for (const Failure& one : lost) reason += (reason.empty() ? "" : "; ") + one.text();
      if (left.empty()) return log_warning(reason + ", when the run was done");
      if (reason.empty()) reason = "a rank was done before the others";
      views.next(left, reason);
      for (const Failure& one : lost)
        if (!one.left()) gone.push_back(one.rank);
      log_warning(fmt::format("{}; elastic.min_ranks: {} on, as view {}", reason,
                              left.size() == 1 ? fmt::format("rank {} goes", left.front())
                                               : fmt::format("ranks {} go", fmt::join(left, ", ")),
                              views.number()));
    }
    lost.clear();
  };
  while (!ranks.running().empty()) {
    const int signal = gate.next(std::chrono::milliseconds(regroup ? 20 : 100));
    if (signal != 0 && signal != SIGCHLD) {
      if (stopping && Clock::now() - stopped_at < kSameRequest) continue;
      ranks.signal_all(signal);
      if (stopping) sooner(kill, kLastWordsSeconds);
      if (!stopping) stopped_at = Clock::now(), stopping = signal;
    }
    // A rank gave up instead of agreeing with the others on a step.
    if (stopping && !kill && options.min_ranks == 0 && !views.store().first_reason().empty())
      kill.emplace(kLastWordsSeconds);
    while (std::optional<Ending> ended = ranks.next_ended()) {
      const int rank = ended->rank;
      if (const auto found = hung.find(rank); found != hung.end()) {
        ended->why = found->second;
        hung.erase(found);
      }
      if (rank == guest) {
        views.uninvite("the rank that was to join has ended");
        const Failure failure{*ended, ended->signal != 0};
        if (std::ranges::count(views.ranks(), rank) > 0) {  // the others may be on their way to its view
          lost.push_back(failure);
          regroup.emplace(kMoreDeathsSeconds);
        } else {
          if (!failed && !stopping && done == 0) log_warning(failure.text() + " before it had joined");
          gone.push_back(rank);
        }
        guest.reset();
        continue;
      }
      if (ended->signal == 0 && ended->code == 0) {
        if (in_order > 0) sooner(terminate, in_order);
        ++done;
        if (views.number() > 1 && !failed && !regroup && is_missing(rank))
          regroup.emplace(kMoreDeathsSeconds);
        continue;
      }
      const bool passed_on = stopping && is_stop_signal(ended->signal);
      const Failure failure{*ended, ended->signal != 0 && !killing && !passed_on};
      const bool met = ranks.begun() && (views.number() > 1 || views.store().missing().empty());
      if (options.min_ranks > 0 && failure.lone(stopping != 0) && met && !killing && failures.empty()) {
        lost.push_back(failure);
        regroup.emplace(kMoreDeathsSeconds);
      } else {
        failures.push_back(failure);
      }
    }
    if (options.min_ranks > 0) {
      if (const auto [rank, why] = failed ? std::pair(-1, std::string()) : views.hanging(ranks.running());
          rank >= 0 && std::ranges::count(ranks.running(), rank) > 0 && hung.try_emplace(rank, why).second)
        ranks.kill_one(rank, why + "; started again, it joins");
      if (regroup && (regroup->over() || ranks.running().empty() || !failures.empty())) go_on();
      if (guest && (done > 0 || ranks.running().size() == 1)) ranks.kill_one(*guest, "came too late");
      if (guest && guest_patience.over()) ranks.kill_one(*guest, "did not join within dist.timeout_s");
      if (!regroup && !stopping && failures.empty() && done == 0 && views.missing().empty()) {
        if (guest && std::ranges::count(views.ranks(), *guest) > 0) guest.reset();  // all have come
        if (!guest) {
          guest = ranks.newcomer(gone, views.last_number());
          guest_patience = Patience(options.timeout_s);
        } else if (guest && !views.invited()) {
          views.invite(*guest);
        } else if (views.guest_came()) {
          views.admit();
          log_info(fmt::format("rank {} is to join, as view {}", *guest, views.number()));
        }
      }
    }
    if (!failed && !failures.empty()) {
      failed = true;
      if (options.min_ranks > 0) views.end();
      if (!stopping) views.store().abort(cause(failures, views.store().first_reason_rank()).text());
      terminate.emplace(stopping ? in_order : grace_s);
    }
    if (terminate && terminate->over()) {
      if (failures.empty() && !ranks.running().empty())
        hanging = fmt::format("rank {} did not end within {:g} s after the others", ranks.running().front(),
                              in_order);
      ranks.signal_all(SIGTERM);
      killing = true;
      terminate.reset();
      kill.emplace(2);
    }
    if (kill && kill->over()) {
      ranks.signal_all(SIGKILL);
      killing = true;
    }
  }
  if (failures.empty()) return 0;
  const TcpStoreServer& store = views.store();
  const Failure& failure = cause(failures, store.first_reason_rank());
  // A rank's own reason says more than how its process ended, but for one that had to be killed.
  const bool told = store.reason_by_rank() && (!failure.killed || store.first_reason_rank() == failure.rank);
  if (!stopping && failure.left())
    log_warning("the ranks have stopped: " + failure.text());
  else if (!stopping || failure.killed || told)
    log_error("the run has ended; first error: " + (!hanging.empty() ? hanging
                                                    : told           ? store.first_reason()
                                                                     : failure.text()));
  // A rank that had to be killed after a stop signal ends because of that.
  return stopping && !failure.killed && failure.signal != 0 ? 128 + stopping : failure.exit_code();
}

}  // namespace topknot
