#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "dist/launch/launch.h"
#include "dist/launch/supervise.h"
#include "nn/base/text.h"

extern char** environ;

namespace topknot {
namespace {

class Children : public Ranks {
 public:
  using Environment = std::function<std::vector<std::string>(int rank, int joins_after)>;
  Children(Environment environment, char* const* argv, const SignalGate& gate, int respawns)
      : environment_(std::move(environment)), argv_(argv), gate_(gate), respawns_(respawns) {}
  ~Children() override { kill_all(SIGKILL, true); }

  void start(int rank, int joins_after = 0) {
    const std::vector<std::string> environment = environment_(rank, joins_after);
    std::vector<char*> pointers;
    for (const auto& entry : environment) pointers.push_back(const_cast<char*>(entry.c_str()));
    pointers.push_back(nullptr);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &gate_.before());
    // One process group each: Ctrl-C reaches the launcher alone, which passes it on once.
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    pid_t pid = 0;
    const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, &attributes, argv_, pointers.data());
    posix_spawnattr_destroy(&attributes);
    if (error != 0)
      throw UserError(fmt::format(
          "cannot start rank {} ({}){}", rank, std::strerror(error),
          error == EAGAIN ? "; raise the limit of processes (ulimit -u), or lower dist.ranks" : ""));
    pids_.resize(std::max(pids_.size(), static_cast<std::size_t>(rank) + 1));
    pids_[static_cast<std::size_t>(rank)] = pid;
  }

  std::vector<int> running() const override {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  void signal_all(int signal) override { kill_all(signal, false); }
  void kill_one(int rank, const std::string&) override {
    if (pids_[static_cast<std::size_t>(rank)] > 0) kill(pids_[static_cast<std::size_t>(rank)], SIGKILL);
  }

  std::optional<Ending> next_ended() override {
    int status = 0;
    for (std::size_t r = 0; r < pids_.size(); ++r)
      if (pids_[r] > 0 && waitpid(pids_[r], &status, WNOHANG) == pids_[r]) {
        pids_[r] = 0;
        return Ending{static_cast<int>(r), WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                      WIFSIGNALED(status) ? WTERMSIG(status) : 0};
      }
    return {};
  }

  // Starts one that is gone again.
  std::optional<int> newcomer(std::vector<int>& gone, int after) override {
    if (gone.empty() || respawns_ <= 0) return {};
    --respawns_;
    const int rank = gone.front();
    gone.erase(gone.begin());
    start(rank, after);
    return rank;
  }

 private:
  void kill_all(int signal, bool and_wait) {
    for (pid_t& pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, signal);
      if (and_wait) waitpid(std::exchange(pid, 0), nullptr, 0);
    }
  }

  const Environment environment_;
  char* const* const argv_;
  const SignalGate& gate_;
  int respawns_;
  std::vector<pid_t> pids_;
};

// `proof`: a file that the copies inherit. `joins_after`: LaunchPlan's.
std::vector<std::string> environment_of(int rank, int size, int port, const std::string& token, int proof,
                                        int joins_after, const std::string& run) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, "TOPKNOT_", 8) != 0) result.push_back(*entry);
  result.insert(result.end(),
                {fmt::format("TOPKNOT_RANK={}", rank), fmt::format("TOPKNOT_RANKS={}", size),
                 fmt::format("TOPKNOT_MASTER=127.0.0.1:{}", port), fmt::format("TOPKNOT_PARENT={}", getpid()),
                 "TOPKNOT_LAUNCH=" + file_name(proof), "TOPKNOT_TOKEN=" + token,
                 fmt::format("TOPKNOT_JOINS_AFTER={}", joins_after), "TOPKNOT_RUN=" + run});
  return result;
}

}  // namespace

int run_spawned(const LaunchPlan& plan, const DistOptions& options, char* const* argv, double grace_s,
                const std::function<void()>& on_ready) {
  TOPKNOT_CHECK(plan.kind == LaunchPlan::Kind::spawn, "this process is a rank, not a launcher");
  const SignalGate gate;
  const std::string token = options.token.empty() ? random_token() : options.token;
  const Fd proof(memfd_create("topknot-ranks", 0));
  TOPKNOT_CHECK(proof.valid(), "no file for the ranks to inherit: " + errno_text());
  // The newline comes last, so a reader sees whole lines.
  const auto publish = [&](const std::string& line) {
    const off_t end = lseek(proof.get(), 0, SEEK_END);
    TOPKNOT_CHECK(pwrite(proof.get(), line.data(), line.size(), end) == std::ssize(line),
                  "the ranks could not be told who goes on: " + errno_text());
  };
  ViewServer views("127.0.0.1", plan.port, plan.size, options, token, publish);
  if (on_ready) {
    // Until there are ranks a stop signal ends this process at once: on_ready() may hang in a file system.
    pthread_sigmask(SIG_SETMASK, &gate.before(), nullptr);
    on_ready();
    pthread_sigmask(SIG_BLOCK, &gate.taken(), nullptr);
  }
  const auto environment = [&](int rank, int joins_after) {
    return environment_of(rank, plan.size, views.store().port(), token, proof.get(), joins_after,
                          options.run);
  };
  Children children(environment, argv, gate, options.respawns);
  for (int r = 0; r < plan.size; ++r) children.start(r);
  return supervise(children, views, gate, options, grace_s);
}

}  // namespace topknot
