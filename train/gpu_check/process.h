#pragma once
// Programs that gpu-check starts, each with a deadline.

#include <map>
#include <string>
#include <vector>

namespace topknot::gpu_check {

struct Outcome {
  int code = -1;           // exit status; 128 + signal where one ended it
  bool timed_out = false;  // was killed at its deadline
  bool found = true;       // false: there is no such program
  double seconds = 0;
  std::string output;  // of both streams, the last 64 kB
  bool ok() const { return found && !timed_out && code == 0; }
  // The last line that is not empty, for a note.
  std::string last_line() const;
};

struct Command {
  std::vector<std::string> argv;
  std::map<std::string, std::string> environment = {};  // added to this process's own
};

// Runs them side by side; whatever still runs after `seconds` is killed, with its children.
std::vector<Outcome> run_all(const std::vector<Command>& commands, double seconds);
Outcome run(const Command& command, double seconds);
// Whether a program of this name is on the PATH, or is a file that can be run.
bool is_program(const std::string& name);

}  // namespace topknot::gpu_check
