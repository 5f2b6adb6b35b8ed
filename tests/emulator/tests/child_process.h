#pragma once
// What a function does that may end its process: run in a child of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/support/test.h"

namespace topknot::testing {

struct ChildEnd {
  bool aborted = false;  // else the function returned
  std::string text;      // what it wrote to stderr
};

// No other thread of the process may hold a lock that `work` needs.
inline ChildEnd run_in_child(const std::function<void()>& work) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // Catch has a handler, which would report
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]), close(ends[1]);
    try {
      work();
    } catch (...) {
      _exit(1);
    }
    _exit(0);
  }
  close(ends[1]);
  ChildEnd ended;
  char some[256];
  for (ssize_t n; (n = read(ends[0], some, sizeof some)) > 0;) ended.text.append(some, std::size_t(n));
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  ended.aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  if (!ended.aborted) CHECK(status == 0);
  return ended;
}

}  // namespace topknot::testing
