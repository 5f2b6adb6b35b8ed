#pragma once
// Processes of a test.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

namespace topknot::testing {

// A process that runs `body` and ends with 0, or with 1 if it throws, and in any case after 100 seconds. It is a copy of
// the caller's thread alone.
template <class Body>
pid_t start_process(const Body& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(100);
  int code = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 1;
  }
  std::_Exit(code);
}

// The exit code of a process that ends; 128 + the signal that ended it.
inline int code_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace topknot::testing
