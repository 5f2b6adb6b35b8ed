#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "dist/launch/launch.h"
#include "dist/rendezvous/tcp_store.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"

extern char** environ;

namespace topknot {
namespace {

constexpr auto kSameRequest = std::chrono::milliseconds(100);  // as install_stop_handlers()
// For the ranks to end after one of them gave up its waiting, or after a second stop signal.
constexpr double kLastWordsSeconds = 0.3;
// For other ranks that die with one, until the rest goes on.
constexpr double kMoreDeathsSeconds = 0.1;

// Blocks the signals that the supervisor handles one by one, in this thread and those that it starts, while
// it lives. SIGCHLD has its default action meanwhile: if it is ignored, as a parent may leave it, nobody can
// wait for a child.
class SignalGate {
 public:
  SignalGate() {
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &standard, &child_before_);
    sigemptyset(&taken_);
    sigaddset(&taken_, SIGCHLD);
    for (const int signal : kStopSignals) sigaddset(&taken_, signal);
    pthread_sigmask(SIG_BLOCK, &taken_, &before_);
  }
  ~SignalGate() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    sigaction(SIGCHLD, &child_before_, nullptr);
  }
  const sigset_t& taken() const { return taken_; }
  const sigset_t& before() const { return before_; }
  // 0 when nothing came in time.
  int next(std::chrono::milliseconds timeout) const {
    const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
    const int signal = sigtimedwait(&taken_, nullptr, &time);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t taken_{}, before_{};
  struct sigaction child_before_ {};
};

class Children {
 public:
  ~Children() { kill_all(SIGKILL, true); }

  void start(int rank, const std::vector<std::string>& environment, char* const* argv,
             const SignalGate& gate) {
    std::vector<char*> pointers;
    for (const auto& entry : environment) pointers.push_back(const_cast<char*>(entry.c_str()));
    pointers.push_back(nullptr);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &gate.before());
    // One process group each: Ctrl-C reaches the launcher alone, which passes it on once.
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    pid_t pid = 0;
    const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, &attributes, argv, pointers.data());
    posix_spawnattr_destroy(&attributes);
    if (error != 0)
      throw UserError(fmt::format(
          "cannot start rank {} ({}){}", rank, std::strerror(error),
          error == EAGAIN ? "; raise the limit of processes (ulimit -u), or lower dist.ranks" : ""));
    pids_.push_back(pid);
  }

  int alive() const { return static_cast<int>(running().size()); }

  std::vector<int> running() const {  // ranks, ascending
    std::vector<int> ranks;
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  void kill_one(int rank) {
    if (pids_[static_cast<std::size_t>(rank)] > 0) kill(pids_[static_cast<std::size_t>(rank)], SIGKILL);
  }

  void kill_all(int signal, bool and_wait = false) {
    for (pid_t& pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, signal);
      if (and_wait) {
        waitpid(pid, nullptr, 0);
        pid = 0;
      }
    }
  }

  // A child that ended: its rank and status.
  bool reap(int& rank, int& status) {
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0 && waitpid(pids_[r], &status, WNOHANG) == pids_[r]) {
        pids_[r] = 0;
        rank = static_cast<int>(r);
        return true;
      }
    return false;
  }

 private:
  std::vector<pid_t> pids_;
};

// 128 random bits: another job's ranks do not have them.
std::string random_token() {
  unsigned char bytes[16];
  TOPKNOT_CHECK(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "no random bytes could be had");
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

// `proof`: a file that the copies inherit.
std::vector<std::string> environment_of(int rank, int size, int port, const std::string& token, int proof) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, "TOPKNOT_", 8) != 0) result.push_back(*entry);
  result.push_back(fmt::format("TOPKNOT_RANK={}", rank));
  result.push_back(fmt::format("TOPKNOT_RANKS={}", size));
  result.push_back(fmt::format("TOPKNOT_MASTER=127.0.0.1:{}", port));
  result.push_back(fmt::format("TOPKNOT_PARENT={}", getpid()));
  result.push_back("TOPKNOT_LAUNCH=" + file_name(proof));
  result.push_back("TOPKNOT_TOKEN=" + token);
  return result;
}

// Views are lines "NUMBER PORT RANK RANK ...\n" in the file that the copies inherit. Lines are added only, and the newline
// comes last, so a reader sees whole ones. A view without ranks says that the run ends.
void publish(const View& view, int file) {
  const std::string line = fmt::format("{} {} {}\n", view.number, view.port, fmt::join(view.ranks, " "));
  const off_t end = lseek(file, 0, SEEK_END);
  TOPKNOT_CHECK(pwrite(file, line.data(), line.size(), end) == static_cast<ssize_t>(line.size()),
                "the ranks could not be told who goes on: " + errno_text());
}

// The newest one; the first view if there is none.
View newest_view(int file) {
  std::string text;
  char bytes[4096];
  for (ssize_t n; (n = pread(file, bytes, sizeof bytes, static_cast<off_t>(text.size()))) > 0;)
    text.append(bytes, static_cast<std::size_t>(n));
  text.resize(text.rfind('\n') + 1);
  View view;
  if (text.empty()) return view;
  text.pop_back();
  std::istringstream words(text.substr(text.rfind('\n') + 1));
  words >> view.number >> view.port;
  for (int rank; words >> rank;) view.ranks.push_back(rank);
  return view;
}

// The rendezvous of the views, in the launcher.
class ViewServer {
 public:
  // `file`: the inherited one.
  ViewServer(const LaunchPlan& plan, const DistOptions& options, const std::string& token, int file)
      : options_(options), token_(token), file_(file) {
    for (int r = 0; r < plan.size; ++r) view_.ranks.push_back(r);
    open(plan.port);
  }

  TcpStoreServer& store() { return *stores_.back(); }
  int number() const { return view_.number; }
  std::vector<int> missing() {  // ranks that have not come to the newest view; one alone need not
    if (view_.ranks.size() == 1) return {};
    std::vector<int> ranks = store().missing();
    for (int& rank : ranks) rank = view_.ranks[static_cast<std::size_t>(rank)];
    return ranks;
  }
  // Those missing have had their time.
  bool late() { return joining_.over() && !missing().empty(); }

  void next(std::vector<int> ranks, const std::string& reason) {
    store().abort(reason);
    view_.ranks = std::move(ranks), ++view_.number;
    open(0);
    view_.port = store().port();
    publish(view_, file_);
  }
  void end() { publish({view_.number + 1, {}, 0}, file_); }

 private:
  void open(int port) {
    stores_.push_back(std::make_unique<TcpStoreServer>(
        "127.0.0.1", port, static_cast<int>(view_.ranks.size()), options_.timeout_s, token_));
    joining_ = Patience(options_.timeout_s);
  }

  const DistOptions& options_;
  const std::string token_;
  const int file_;
  View view_;
  Patience joining_;
  std::vector<std::unique_ptr<TcpStoreServer>> stores_;  // earlier ones tell their ranks the reason
};

bool is_stop_signal(int signal) {
  return std::count(std::begin(kStopSignals), std::end(kStopSignals), signal) > 0;
}

// A rank that ended other than with exit code 0.
struct Failure {
  int rank, status;
  bool killed;  // by a signal that did not come from here
  // A fault of this rank alone, as far as its end tells: not of its input or of the training.
  bool lone() const { return killed || (WIFEXITED(status) && WEXITSTATUS(status) == 1); }
  int code() const { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }
  std::string text() const {
    if (!WIFSIGNALED(status))
      return fmt::format("rank {} ended with exit code {}", rank, WEXITSTATUS(status));
    const int signal = WTERMSIG(status);
    return fmt::format("rank {} died: killed by signal {} ({})", rank, signal, strsignal(signal));
  }
};

// The failure that caused the others: of a rank that something else killed, else of the rank that gave the
// store its first reason, else the first that was seen. `failures` has one at least.
const Failure& cause(const std::vector<Failure>& failures, int first_rank) {
  for (const auto& failure : failures)
    if (failure.killed) return failure;
  for (const auto& failure : failures)
    if (failure.rank == first_rank) return failure;
  return failures.front();
}

}  // namespace

Rejoin make_rejoin(const LaunchPlan& plan, const DistOptions& options) {
  const char* name = std::getenv("TOPKNOT_LAUNCH");
  TOPKNOT_CHECK(plan.launcher == "spawn" && name,
                "only a rank that run_spawned() started joins another view");
  return [plan, options, file = std::atoi(name)](View& view) -> std::unique_ptr<Communicator> {
    constexpr double kAnnounced = 30;  // seconds
    Patience patience(kAnnounced);
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      const View next = newest_view(file);
      if (next.number > view.number) {
        const auto place = std::find(next.ranks.begin(), next.ranks.end(), plan.rank);
        if (place == next.ranks.end()) return nullptr;
        view = next;
        LaunchPlan joined = plan;
        joined.rank = static_cast<int>(place - next.ranks.begin());
        joined.size = static_cast<int>(view.ranks.size());
        joined.port = view.port;
        return join_group(joined, options);
      }
      if (stop_signal() != 0)
        throw Interrupted(
            fmt::format("stopped by {} while the other ranks were to go on", signal_name(stop_signal())));
      if (patience.over()) throw UserError("a collective failed, and no rank has died");
    }
  };
}

int run_spawned(const LaunchPlan& plan, const DistOptions& options, char* const* argv, double grace_s,
                const std::function<void()>& on_ready) {
  TOPKNOT_CHECK(plan.kind == LaunchPlan::Kind::spawn, "this process is a rank, not a launcher");
  const SignalGate gate;
  const std::string token = options.token.empty() ? random_token() : options.token;
  const Fd proof(memfd_create("topknot-ranks", 0));
  TOPKNOT_CHECK(proof.valid(), "no file for the ranks to inherit: " + errno_text());
  ViewServer views(plan, options, token, proof.get());
  if (on_ready) {
    // Until there are ranks to look after, a stop signal ends this process at once: on_ready() may hang in a
    // file system.
    pthread_sigmask(SIG_SETMASK, &gate.before(), nullptr);
    on_ready();
    pthread_sigmask(SIG_BLOCK, &gate.taken(), nullptr);
  }
  Children children;
  for (int r = 0; r < plan.size; ++r)
    children.start(r, environment_of(r, plan.size, views.store().port(), token, proof.get()), argv, gate);

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
  const auto is_missing = [&](int rank) {
    const std::vector<int> missing = views.missing();
    return std::count(missing.begin(), missing.end(), rank) > 0;
  };
  const auto go_on = [&] {
    regroup.reset();
    const std::vector<int> left = children.running();
    // A rank ends in order after all have agreed that the run is done.
    if ((done == 0 && static_cast<int>(left.size()) < options.min_ranks) || !failures.empty()) {
      failures.insert(failures.begin(), lost.begin(), lost.end());
    } else {
      std::string reason;
      for (const Failure& one : lost) reason += (reason.empty() ? "" : "; ") + one.text();
      if (left.empty()) return log_warning(reason + ", when the run was done");
      if (reason.empty()) reason = "a rank was done before the others";
      views.next(left, reason);
      log_warning(fmt::format("{}; elastic.min_ranks: {} on, as view {}", reason,
                              left.size() == 1 ? fmt::format("rank {} goes", left.front())
                                               : fmt::format("ranks {} go", fmt::join(left, ", ")),
                              views.number()));
    }
    lost.clear();
  };
  while (children.alive() > 0) {
    const int signal = gate.next(std::chrono::milliseconds(regroup ? 20 : 100));
    if (signal != 0 && signal != SIGCHLD) {
      if (stopping && Clock::now() - stopped_at < kSameRequest) continue;
      children.kill_all(signal);
      if (stopping) sooner(kill, kLastWordsSeconds);
      if (!stopping) stopped_at = Clock::now(), stopping = signal;
    }
    // A rank gave up instead of agreeing with the others on a step.
    if (stopping && !kill && !views.store().first_reason().empty()) kill.emplace(kLastWordsSeconds);
    int rank, status;
    while (children.reap(rank, status)) {
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (in_order > 0) sooner(terminate, in_order);
        ++done;
        if (views.number() > 1 && !failed && !regroup && is_missing(rank))
          regroup.emplace(kMoreDeathsSeconds);
        continue;
      }
      const bool passed_on = stopping && WIFSIGNALED(status) && is_stop_signal(WTERMSIG(status));
      const Failure failure{rank, status, WIFSIGNALED(status) && !killing && !passed_on};
      const bool met = views.number() > 1 || views.store().missing().empty();
      if (options.min_ranks > 0 && failure.lone() && met && !stopping && !killing && failures.empty()) {
        lost.push_back(failure);
        regroup.emplace(kMoreDeathsSeconds);
      } else {
        failures.push_back(failure);
      }
    }
    if (options.min_ranks > 0) {
      if (views.number() > 1 && !failed && views.late())
        for (const int late : views.missing()) children.kill_one(late);
      if (regroup && (regroup->over() || children.alive() == 0 || !failures.empty())) go_on();
    }
    if (!failed && !failures.empty()) {
      failed = true;
      if (options.min_ranks > 0) views.end();
      if (!stopping) views.store().abort(cause(failures, views.store().first_reason_rank()).text());
      terminate.emplace(stopping ? in_order : grace_s);
    }
    if (terminate && terminate->over()) {
      if (failures.empty() && children.alive() > 0)
        hanging = fmt::format("rank {} did not end within {:g} s after the others",
                              children.running().front(), in_order);
      children.kill_all(SIGTERM);
      killing = true;
      terminate.reset();
      kill.emplace(2);
    }
    if (kill && kill->over()) {
      children.kill_all(SIGKILL);
      killing = true;
    }
  }
  if (failures.empty()) return 0;
  const TcpStoreServer& store = views.store();
  const Failure& failure = cause(failures, store.first_reason_rank());
  // A reason that a rank gave itself says more than how its process ended; that of a rank which had to be
  // killed is known.
  const bool told = store.reason_by_rank() && (!failure.killed || store.first_reason_rank() == failure.rank);
  if (!stopping || failure.killed || told)
    log_error("the run has ended; first error: " + (!hanging.empty() ? hanging
                                                    : told           ? store.first_reason()
                                                                     : failure.text()));
  // A rank that had to be killed after a stop signal ends because of that.
  return stopping && !failure.killed && WIFSIGNALED(failure.status) ? 128 + stopping : failure.code();
}

}  // namespace topknot
