#pragma once
// What every program's main shares: errors turned into exit codes, and the signals that ask for a stop.

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "nn/base/check.h"

namespace topknot {

// The signals that ask for a stop. Batch systems send SIGUSR1, where asked to, some time before they end a job.
inline constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGUSR1};
// "SIGTERM"; "signal 9" for those that ask for no stop.
std::string signal_name(int signal);

// The signal that asked for a stop of this process, or 0.
int stop_signal();

// Thrown where work ends early because of a stop signal, of this process or of another rank's.
struct Interrupted : Error {
  explicit Interrupted(const std::string& text, int number = stop_signal()) : Error(text), signal(number) {}
  int signal;
};

// An error as a message; where the system has no more threads, with what to do about it.
std::string explain(const std::exception& error);

// First repairs what a program may be started with: opens /dev/null where standard input, output or error is closed,
// whose numbers files would get; ignores SIGXFSZ, so that a write beyond `ulimit -f` fails with a message; unblocks the
// stop signals. Then returns what `body` returns, or 2 where standard output could not be written to its end. An exception ends in one
// message on standard error and an exit code: UserError and std::bad_alloc
// 2, Interrupted 128 + signal, anything else 1. The message begins with `name`; where that is null it is
// logged as an error, with the rank (nn/base/log.h).
int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv);

// Installs handlers for kStopSignals, process-wide, and forgets an earlier signal. The first signal asks for a stop:
// the handler sets a flag, nothing else. A second one of any kind ends the process at once, unless it comes within
// 0.1 s, as senders such as timeout(1) signal a process and then its group, or is the first from the parent: a launcher
// passes on what it and its ranks may have been sent together.
//
// To be called by the main thread, to which the system gives the process's signals: the handler runs on a stack of that
// thread's own.
void install_stop_handlers();

// Ends this process with 128 + signal where a stop signal has come and this object still lives `patience` later: around
// what may be long or hang in the system (a network file system) and cannot look at stop_signal().
class EndAfterSignal {
 public:
  // `doing`: what goes on, for the message: "while reading the data". `last_words` is called with the message before the
  // end, on another thread.
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

}  // namespace topknot
