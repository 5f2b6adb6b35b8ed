#pragma once
// Runs a program as a shell would and brings back what a user sees.

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace topknot {

struct Outcome {
  int code = -1;       // exit code; 128 + signal where a signal ended it
  std::string output;  // standard output and standard error, as they came
  bool has(const std::string& text) const { return output.find(text) != std::string::npos; }
  int count(const std::string& text) const {
    int found = 0;
    for (std::size_t at = 0; (at = output.find(text, at)) != std::string::npos; ++at) ++found;
    return found;
  }
};

// `timeout` guards the test against a hang: whoever needs it has failed.
inline Outcome run_command(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen(("timeout -k 5 120 sh -c '" + command + "' 2>&1").c_str(), "r");
  if (!pipe) return outcome;
  std::array<char, 4096> buffer;
  while (const std::size_t n = fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.output.append(buffer.data(), n);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

inline Outcome train(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/train " + arguments);
}
inline Outcome compare(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/compare " + arguments);
}
inline Outcome sparsify(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/sparsify " + arguments);
}

}  // namespace topknot
