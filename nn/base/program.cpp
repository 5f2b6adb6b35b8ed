#include "nn/base/program.h"

#include <fcntl.h>
#include <malloc.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

constexpr std::int64_t kSameRequest = 100'000'000;  // ns in which further signals are the same request

// Written by the handler, on whichever thread it runs, and read by all threads.
std::atomic<int> received{0};
std::atomic<std::int64_t> received_at{0};  // ns
std::atomic<pid_t> passed_on{0};           // who has sent a signal to all of a run's processes
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a signal handler takes no locks");

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void on_signal(int number, siginfo_t* info, void*) {
  const std::int64_t now = now_ns();
  const bool from_parent = info->si_code == SI_USER && info->si_pid == getppid();
  // If a signal was sent to all processes, the launcher's copy of it may come much later.
  const bool copy = from_parent && passed_on.exchange(info->si_pid) == 0;
  if (received == 0) {
    received_at = now;
    received = number;
  } else if (!copy && now - received_at >= kSameRequest) {
    std::signal(number, SIG_DFL);
    std::raise(number);  // takes effect when the handler returns
  }
}

void report(const char* name, const char* kind, const char* message) {
  if (name)
    std::fprintf(stderr, "%s %s%s\n", coloured(std::string(name) + ":", Colour::red, STDERR_FILENO).c_str(),
                 kind, printable(message, std::string::npos).c_str());
  else
    log_error(message);
}

}  // namespace

std::string signal_name(int signal) {
  switch (signal) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "signal " + std::to_string(signal);
  }
}

std::string explain(const std::exception& error) {
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  if (system && system->code() == std::errc::resource_unavailable_try_again)
    return std::string("no thread can be started (") + error.what() +
           "); raise the limit of threads and processes (ulimit -u), or lower dist.ranks, data.workers or "
           "train.threads";
  return error.what();
}

int exit_code_of(const std::exception& error) {
  if (const auto* interrupted = dynamic_cast<const Interrupted*>(&error)) return 128 + interrupted->signal;
  if (dynamic_cast<const Diverged*>(&error)) return 3;
  return dynamic_cast<const UserError*>(&error) || dynamic_cast<const std::bad_alloc*>(&error) ? 2 : 1;
}

namespace {

int run_and_report(const char* name, int (*body)(int argc, char** argv), int argc, char** argv) {
  try {
    check_stacks();
    const int code = body(argc, argv);
    errno = 0;
    // std::cout's buffer is in stdout too.
    if (code == 0 && (std::fflush(stdout) != 0 || std::ferror(stdout)))
      throw UserError("standard output cannot be written: " + errno_text() + "; is the disk full?");
    return code;
  } catch (const std::bad_alloc&) {
    report(name, "", OutOfMemory("an allocation of unknown size has failed", 0).what());
    return 2;
  } catch (const std::exception& error) {
    const int code = exit_code_of(error);
    report(name, code == 1 ? "unexpected error: " : "", explain(error).c_str());
    return code;
  }
}

sigset_t stop_signal_set() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kStopSignals) sigaddset(&set, signal);
  return set;
}

void prepare_process() {
  // The lowest free number is the one that is closed. Only a system without /dev/null leaves it so.
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) break;
  std::signal(SIGXFSZ, SIG_IGN);
  const sigset_t stop = stop_signal_set();
  pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
}

}  // namespace

int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv) {
  prepare_process();
  // Each further arena of malloc, one a thread, reserves 64 MB that a limit of the address space counts.
  constexpr double kAnyLimit = 1e15;
  if (address_room() < kAnyLimit) mallopt(M_ARENA_MAX, 1);
  try {
    return run_and_report(name, body, argc, argv);
  } catch (const std::bad_alloc&) {  // for the message itself
    std::fputs("error: out of memory: too little is left to say for what\n", stderr);
    return 2;
  }
}

namespace {

// Matrix products of oneDNN up to 3.11 let the stack pointer point into the heap while they run (its issue
// 4845): what the system writes below it to call a handler would fall on other data.
void handle_signals_on_own_stack() {
  alignas(16) static char space[64 * 1024];  // the state of all registers takes up to 12 KiB
  stack_t stack{};
  if (sigaltstack(nullptr, &stack) == 0 && (stack.ss_flags & SS_DISABLE) == 0) return;  // a sanitizer's
  stack = {.ss_sp = space, .ss_flags = 0, .ss_size = sizeof space};
  TOPKNOT_CHECK(sigaltstack(&stack, nullptr) == 0, "no stack for signal handlers: " + errno_text());
}

}  // namespace

void install_stop_handlers() {
  received = 0;
  passed_on = 0;
  handle_signals_on_own_stack();
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_RESTART | SA_SIGINFO | SA_ONSTACK;
  action.sa_mask = stop_signal_set();  // one handler at a time: a second signal of another kind waits
  for (const int signal : kStopSignals) sigaction(signal, &action, nullptr);
}

int stop_signal() {
  return received;
}

void pass_stop_on(int signal) {
  passed_on = getpid();  // a signal that came before from elsewhere was meant for all
  if (received != 0) return;
  received_at = now_ns();
  received = signal;
}

pid_t stop_passed_on_by() {
  return passed_on;
}

EndAfterSignal::EndAfterSignal(std::string doing, std::chrono::milliseconds patience,
                               std::function<void(const std::string&)> last_words)
    : doing_(std::move(doing)),
      patience_(std::chrono::duration<double>(patience).count()),
      last_words_(std::move(last_words)) {
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error&) {  // no thread is left: a second signal ends the process
  }
}

EndAfterSignal::~EndAfterSignal() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void EndAfterSignal::watch() {
  Patience waited;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return over_; })) {
    const int signal = stop_signal();
    if (signal == 0)
      waited = Patience();
    else if (waited.passed() >= patience_) {
      const std::string text = "stopped by " + signal_name(signal) + " " + doing_;
      if (last_words_) last_words_(text);
      log_error(text);
      std::_Exit(128 + signal);  // what other threads use stays in place
    }
  }
}

}  // namespace topknot
