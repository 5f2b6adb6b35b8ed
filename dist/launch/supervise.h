#pragma once
// Looks after the ranks of a run until all have ended: those that this process started on one host (launch_spawn.cpp), or
// those that came to `train --coordinate` (coordinate.cpp).

#include <signal.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "dist/launch/views.h"

namespace topknot {

// Blocks the signals that the supervisor handles one by one, in this thread and those that it starts, while
// it lives. SIGCHLD has its default action meanwhile: if it is ignored, as a parent may leave it, nobody can
// wait for a child.
class SignalGate {
 public:
  SignalGate();
  ~SignalGate();
  const sigset_t& taken() const { return taken_; }
  const sigset_t& before() const { return before_; }
  // 0 when nothing came in time.
  int next(std::chrono::milliseconds timeout) const;

 private:
  sigset_t taken_{}, before_{};
  struct sigaction child_before_ {};
};

// How a rank ended: by a signal, or else with an exit code.
struct Ending {
  int rank = -1, code = 0, signal = 0;
  std::string why = {};  // what is known beside
};

class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual std::vector<int> running() const = 0;    // ascending
  virtual std::optional<Ending> next_ended() = 0;  // each once
  virtual void signal_all(int signal) = 0;
  virtual void kill_one(int rank, const std::string& why) = 0;  // it ends later
  virtual bool begun() const { return true; }                   // ranks can go on without one that dies
  // A rank that is to join the run in a view after number `after`. `gone`: ranks that died, which may be started again.
  virtual std::optional<int> newcomer(std::vector<int>& gone, int after) = 0;
};

// Returns the exit code that run_spawned() states. From the thread that `gate` was made in.
int supervise(Ranks& ranks, ViewServer& views, const SignalGate& gate, const DistOptions& options,
              double grace_s);

// 128 random bits: another job's ranks do not have them.
std::string random_token();

}  // namespace topknot
