// Waiting, text from outside and stop signals.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "tests/support/catch.h"
#include "tests/support/standard_error.h"
#include "tests/support/test.h"
#include "tests/support/text.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("of a long time in which nobody looked, as of a suspended process, half a second counts") {
  Patience patience(0.6);
  Patience unlimited;
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  CHECK_FALSE(patience.over());
  CHECK(patience.passed() < 0.6);
  while (!patience.over()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(patience.left() <= 0);
  CHECK_FALSE(unlimited.over());
  CHECK(unlimited.passed() > 0);
}

namespace {

TEST_CASE("text from outside moves no cursor, and as one line begins no other") {
  const std::string text = "a\x1b[2J\r\xc2\x9b é\xff\tb\nc\x7f";
  CHECK(printable(text) == "a\\x1b[2J\\x0d\\xc2\\x9b é\\xff\tb\nc\\x7f");
  CHECK(one_line(text) == "a\\x1b[2J\\x0d\\xc2\\x9b é\\xff\\tb\\nc\\x7f");
  CHECK(one_line("abc", 2) == "ab...");
}

TEST_CASE("the log escapes what could move a terminal's cursor, in every level") {
  const testing::StandardError errors;
  log_warning("w\x1b[1m");
  log_error("e\x1b[1m\n  second line");
  set_log_level(LogLevel::debug);
  log_info("i\x1b[1m");
  log_debug("d\x1b[1m");
  set_log_level(LogLevel::info);
  const std::string text = errors.text();
  for (const char* line : {"w\\x1b[1m", "e\\x1b[1m\n  second line", "i\\x1b[1m", "d\\x1b[1m"})
    CHECK(contains(text, line));
  CHECK_FALSE(contains(text, "\x1b[1m"));
}

}  // namespace

namespace {

// How a process ended that ran `body`: its exit code, or 128 + the signal.
template <class Body>
int code_of(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    install_stop_handlers();
    body();
    std::_Exit(stop_signal());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("the first stop signal is kept, a later one ends the process, one at the same time is the same") {
  for (const int signal : kStopSignals) {
    CHECK(code_of([&] { raise(signal); }) == signal);
    CHECK(code_of([&] {
            raise(signal);
            raise(SIGTERM);
          }) == signal);
    CHECK(code_of([&] {
            raise(signal);
            std::this_thread::sleep_for(std::chrono::milliseconds(150));
            raise(SIGTERM);
          }) == 128 + SIGTERM);
  }
}

#ifdef __x86_64__
TEST_CASE("a stop signal writes nothing below the stack pointer, which oneDNN lets point into the heap") {
  CHECK(code_of([] {
          std::vector<char> heap(1 << 20, 'x');
          char* middle = heap.data() + heap.size() / 2;
          long call = SYS_kill;
          asm volatile("xchg %%rsp, %1\n\tsyscall\n\txchg %%rsp, %1"
                       : "+a"(call), "+r"(middle)
                       : "D"(getpid()), "S"(SIGUSR1)
                       : "rcx", "r11", "memory");
          if (std::count(heap.begin(), heap.end(), 'x') != 1 << 20) std::_Exit(1);
        }) == SIGUSR1);
}
#endif

TEST_CASE("the launcher's copy of a stop signal is no second request, however late; its next signal is") {
  for (const bool again : {false, true}) {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) {
      install_stop_handlers();
      raise(SIGUSR1);
      if (write(ready[1], "x", 1) != 1) std::_Exit(1);
      for (int i = 0; i < 2000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::_Exit(stop_signal());
    }
    char x;
    REQUIRE(read(ready[0], &x, 1) == 1);
    close(ready[0]), close(ready[1]);
    for (int i = 0; i < 1 + again; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      kill(child, SIGTERM);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (again)
      CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
    else
      CHECK((WIFEXITED(status) && WEXITSTATUS(status) == SIGUSR1));
  }
}

TEST_CASE("stop signals have names") {
  CHECK(signal_name(SIGINT) == "SIGINT");
  CHECK(signal_name(SIGUSR1) == "SIGUSR1");
  CHECK(signal_name(SIGKILL) == "signal 9");
}
