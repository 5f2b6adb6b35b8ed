#pragma once
// The frame of every program's main: exit codes for errors, signals that ask for a stop, the version.

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "nn/base/check.h"
#include "nn/base/clock.h"

namespace topknot {

// The signals that ask for a stop. Batch systems send SIGUSR1, if asked to, some time before they end a job.
inline constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGUSR1};
// "SIGTERM"; "signal 9" for those that ask for no stop.
std::string signal_name(int signal);

// The signal that asked for a stop of this process, or 0.
int stop_signal();
// The process that has sent one as to all ranks: the parent, a launcher; or this one, for a coordinator. 0: none.
pid_t stop_passed_on_by();
// A stop signal to all ranks that reaches this process as a message: stop_passed_on_by() is then this process.
void pass_stop_on(int signal);
// With which a program ends by this exception, as run_program() says.
int exit_code_of(const std::exception& error);

// Thrown where work ends early because of a stop signal, of this process or of another rank's.
// `signal` 0: a rank leaves a run that goes on; kLeaves is then its exit code.
inline constexpr int kLeaves = 128;
struct Interrupted : Error {
  explicit Interrupted(const std::string& text, int number = stop_signal()) : Error(text), signal(number) {}
  int signal;
};

// Thrown by a training whose result is of no use.
struct Diverged : UserError {
  using UserError::UserError;
};

// How long a wait for other ranks goes on after a stop signal. Within a step, the ranks are to agree on the
// stop and end after the same one (train/trainer.cpp), so a wait ends by itself if the others still come; it
// gives up if nothing happens any more.
class StopGracePeriod {
 public:
  // For peers that are not known to be alive; and for those that are, but may be long in their own part of a
  // step.
  static constexpr std::chrono::milliseconds kSilent{1000};
  inline static std::chrono::milliseconds alive{60'000};  // shorter in tests

  // Polled while waiting: whether to give up. `progress`: any number that changes with every step of the
  // wait.
  bool ended(std::uint64_t progress, bool peers_alive) {
    if (stop_signal() == 0 || progress != progress_ || !started_) {
      progress_ = progress;
      waited_ = Patience();
      started_ = stop_signal() != 0;
      return false;
    }
    return std::chrono::duration<double>(waited_.passed()) >= (peers_alive ? alive : kSilent);
  }

 private:
  bool started_ = false;  // a signal was seen
  std::uint64_t progress_ = 0;
  Patience waited_;  // since the last progress
};

// An error as a message; if the system has no more threads, with what to do about it.
std::string explain(const std::exception& error);

// First repairs what a program may be started with: opens /dev/null if standard input, output or error is
// closed, whose numbers files would get; ignores SIGXFSZ, so that a write beyond `ulimit -f` fails with a
// message; unblocks the stop signals. Then returns what `body` returns, or 2 where standard output could not
// be written to its end. An exception ends in one message on standard error and an exit code: Diverged 3,
// other UserErrors and std::bad_alloc 2, Interrupted 128 + signal, anything else 1. The message begins with `name`; if that is
// null it is logged as an error, with the rank (nn/base/log.h).
int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv);

// Installs handlers for kStopSignals, process-wide, and forgets an earlier signal. The first signal asks for
// a stop: the handler sets a flag, nothing else. A second one of any kind ends the process at once, unless it
// comes within 0.1 s, as senders such as timeout(1) signal a process and then its group, or is the first from
// the parent: a launcher passes on what it and its ranks may have been sent together.
//
// To be called by the main thread, to which the system gives the process's signals: the handler runs on a
// stack of that thread's own.
void install_stop_handlers();

// Ends this process with 128 + signal if a stop signal has come and this object still lives `patience` later:
// around what may be long or hang in the system (a network file system) and cannot look at stop_signal().
class EndAfterSignal {
 public:
  // `doing`: what goes on, for the message: "while reading the data". `last_words` is called with the message
  // before the end, on another thread.
  EndAfterSignal(std::string doing, std::chrono::milliseconds patience,
                 std::function<void(const std::string&)> last_words = {});
  ~EndAfterSignal();
  EndAfterSignal(const EndAfterSignal&) = delete;
  EndAfterSignal& operator=(const EndAfterSignal&) = delete;

 private:
  void watch();

  const std::string doing_;
  const double patience_;
  const std::function<void(const std::string&)> last_words_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

// Which program this is, for records, messages and checks. Written by the build (cmake/Revision.cmake), for
// programs that link train.
const char* program_number();  // "0.2.0"
// The git tree's revision: "0123abc", with changes "0123abc-dirty-89cdef0"; "unknown" without one.
const char* program_revision();
// "topknot 0.2.0 (0123abc)"
inline std::string program_version() {
  return std::string("topknot ") + program_number() + " (" + program_revision() + ")";
}

}  // namespace topknot
