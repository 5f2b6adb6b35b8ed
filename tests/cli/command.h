#pragma once
// Runs a program as a shell would and brings back what a user sees.

#include <sys/wait.h>
#include "tests/support/test.h"
#include "train/metrics/metrics.h"

namespace topknot {

// Keys of a run of a second.
inline const std::string kSmallRun =
    "model.name=mlp model.hidden=[16] data.train_size=256 data.test_size=32 data.batch_size=8 "
    "train.max_steps=12 train.epochs=9 compress.density=0.05 ";
// A script waits until the run in $run has made steps.
inline const std::string kWhenItTrains =
    "while [ $(wc -l 2>/dev/null < $run/metrics.jsonl || echo 0) -lt 5 ]; do sleep 0.02; done; ";

struct CommandOutcome {
  int code = -1;       // exit code; 128 + signal where a signal ended it
  std::string output;  // standard output and standard error, as they came
  // Each shows the output where a check of it fails.
  bool ended(int with) const {
    UNSCOPED_INFO("code " << code << "\n" << output);
    return code == with;
  }
  bool has(const std::string& text) const {
    UNSCOPED_INFO(output);
    return output.find(text) != std::string::npos;
  }
  int count(const std::string& text) const {
    UNSCOPED_INFO(output);
    int found = 0;
    for (std::size_t at = 0; (at = output.find(text, at)) != std::string::npos; ++at) ++found;
    return found;
  }
};

// `timeout` guards the test against a hang: whoever needs it has failed.
inline CommandOutcome run_command(const std::string& command) {
  CommandOutcome outcome;
  FILE* pipe = popen(("timeout -k 5 120 sh -c '" + command + "' 2>&1").c_str(), "r");
  if (!pipe) return outcome;
  std::array<char, 4096> buffer;
  while (const std::size_t n = fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.output.append(buffer.data(), n);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

inline CommandOutcome train(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/train " + arguments);
}
inline CommandOutcome compare(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/compare " + arguments);
}

// A small run in a folder.
inline CommandOutcome train_in(const std::string& folder, const std::string& keys,
                               const std::string& environment = "") {
  return run_command(environment + " " TOPKNOT_BIN "/train " + kSmallRun + keys + " output.dir=" + folder);
}
inline std::string checksum_of(const std::string& folder) {
  return read_metrics(folder + "/metrics.jsonl").end.value().parameter_checksum;
}

// The shell's wait for five steps of the run in a folder.
inline std::string five_steps(const std::string& folder) {
  return "while [ $(wc -l 2>/dev/null < " + folder +
         "/metrics.jsonl || echo 0) -lt 5 ]; do sleep 0.1; done; ";
}

// The exit code, what the output has and what it lacks.
inline void check_outcome(const CommandOutcome& outcome, int code, std::initializer_list<std::string> words,
                          std::initializer_list<std::string> absent = {}) {
  CHECK(outcome.ended(code));
  CHECK(says(outcome.output, words));
  for (const std::string& word : absent) CHECK_FALSE(outcome.has(word));
}

// Bad input: exit code 2 and one message, which holds every one of `words`.
inline void check_refused(const CommandOutcome& outcome, std::initializer_list<const char*> words,
                          const char* prefix = "error: ") {
  CHECK(outcome.ended(2));
  CHECK(outcome.count(prefix) == 1);
  for (const char* word : words) CHECK(outcome.has(word));
}

// --help, and for `alone` no argument at all, print a text that holds every one of `words`.
inline void check_help(CommandOutcome (*program)(const std::string&),
                       std::initializer_list<const char*> words, bool alone = true) {
  for (const char* how : {"--help", ""}) {
    if (!*how && !alone) continue;
    const CommandOutcome outcome = program(how);
    CHECK(outcome.ended(0));
    for (const char* word : words) CHECK(outcome.has(word));
  }
}

}  // namespace topknot
