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
#include <cstring>
#include <optional>
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

  int alive() const {
    int count = 0;
    for (const pid_t pid : pids_) count += pid > 0;
    return count;
  }

  // The lowest rank that runs; there is one.
  int first_alive() const {
    return static_cast<int>(std::find_if(pids_.begin(), pids_.end(), [](pid_t pid) { return pid > 0; }) -
                            pids_.begin());
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

bool is_stop_signal(int signal) {
  return std::count(std::begin(kStopSignals), std::end(kStopSignals), signal) > 0;
}

// A rank that ended other than with exit code 0.
struct Failure {
  int rank, status;
  bool killed;  // by a signal that did not come from here
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

int run_spawned(const LaunchPlan& plan, const DistOptions& options, char* const* argv, double grace_s,
                const std::function<void()>& on_ready) {
  TOPKNOT_CHECK(plan.kind == LaunchPlan::Kind::spawn, "this process is a rank, not a launcher");
  const SignalGate gate;
  const std::string token = options.token.empty() ? random_token() : options.token;
  TcpStoreServer store("127.0.0.1", plan.port, plan.size, options.timeout_s, token);
  if (on_ready) {
    // Until there are ranks to look after, a stop signal ends this process at once: on_ready() may hang in a
    // file system.
    pthread_sigmask(SIG_SETMASK, &gate.before(), nullptr);
    on_ready();
    pthread_sigmask(SIG_BLOCK, &gate.taken(), nullptr);
  }
  const Fd proof(memfd_create("topknot-ranks", 0));
  TOPKNOT_CHECK(proof.valid(), "no file for the ranks to inherit: " + errno_text());
  Children children;
  for (int r = 0; r < plan.size; ++r)
    children.start(r, environment_of(r, plan.size, store.port(), token, proof.get()), argv, gate);

  std::vector<Failure> failures;  // in the order in which they were seen
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
  while (children.alive() > 0) {
    const int signal = gate.next(std::chrono::milliseconds(100));
    if (signal != 0 && signal != SIGCHLD) {
      if (stopping && Clock::now() - stopped_at < kSameRequest) continue;
      children.kill_all(signal);
      if (stopping) sooner(kill, kLastWordsSeconds);
      if (!stopping) stopped_at = Clock::now(), stopping = signal;
    }
    // A rank gave up instead of agreeing with the others on a step.
    if (stopping && !kill && !store.first_reason().empty()) kill.emplace(kLastWordsSeconds);
    int rank, status;
    const bool first = failures.empty();
    while (children.reap(rank, status)) {
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (in_order > 0) sooner(terminate, in_order);
        continue;
      }
      const bool passed_on = stopping && WIFSIGNALED(status) && is_stop_signal(WTERMSIG(status));
      failures.push_back({rank, status, WIFSIGNALED(status) && !killing && !passed_on});
    }
    if (first && !failures.empty()) {
      if (!stopping) store.abort(cause(failures, store.first_reason_rank()).text());
      terminate.emplace(stopping ? in_order : grace_s);
    }
    if (terminate && terminate->over()) {
      if (failures.empty() && children.alive() > 0)
        hanging = fmt::format("rank {} did not end within {:g} s after the others", children.first_alive(),
                              in_order);
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
