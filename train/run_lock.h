#pragma once
// One process at a time writes a run directory: it holds an flock on the file run.lock in there, which names it. The
// kernel releases the lock when the process and the ranks that it started have ended, however they did.

#include <string>

#include "nn/core/base/fd.h"

namespace topknot {

class RunLock {
 public:
  // Throws UserError: the process that holds the directory, or why the file cannot be made. Where a file system has
  // no locks it warns and goes on. Waits up to 10 s for the ranks of a process that has died.
  explicit RunLock(const std::string& directory);

  static constexpr const char* kName = "run.lock";

 private:
  Fd file_;
};

// The process that runs in this directory, "process 4242 on node1"; "" where none does.
std::string running_process(const std::string& directory);

}  // namespace topknot
