#pragma once
// Programs that gpu-check starts, each with a deadline.

#include <map>
#include <string>
#include <vector>

namespace topknot::gpu_check {

struct Outcome {
  int code = -1;           // exit status; 128 + signal where one ended it; -1: it was never started
  bool timed_out = false;  // was killed at its deadline
  bool found = true;       // false: there is no such program
  double seconds = 0;
  std::string output;  // of both streams, the last 64 kB
  bool ok() const { return found && !timed_out && code == 0; }
  // Why it is not ok(), in one line: "not done within 40 s; ...", or the last line it wrote.
  std::string reason(const std::string& name) const;
  // The last line that is more than a rule, for a note; at most 300 characters.
  std::string last_line() const;
};

struct Command {
  std::vector<std::string> argv;
  std::map<std::string, std::string> environment = {};  // added to this process's own
};

// Runs them side by side, without an input and without the variables of a launcher of ranks (torchrun, mpirun,
// srun) in the environment. A program that still runs after `seconds` is killed; the rest of a program's process
// group is killed when the program ends. Returns some seconds after the deadline at the latest, also where a program cannot
// be killed because it hangs in a driver. Throws Interrupted (nn/base/program.h) after a signal.
std::vector<Outcome> run_all(const std::vector<Command>& commands, double seconds);
Outcome run(const Command& command, double seconds);
// Whether a program of this name is on the PATH, or is a file that can be run.
bool is_program(const std::string& name);
// The program's name or path: from the PATH, or from `folder`; "" where neither has it.
std::string find_program(const std::string& name, const std::string& folder);

std::vector<std::string> lines_of(const std::string& text);

}  // namespace topknot::gpu_check
