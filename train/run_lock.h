#pragma once
// One process at a time writes a run directory: it holds an flock on the file run.lock in there, which names it. The
// kernel releases the lock when the process and the ranks that it started have ended, however they did. A lock whose file
// was deleted, moved or replaced keeps nobody out: its holder looks for it whenever it writes.

#include <string>
#include <utility>

#include "nn/base/file.h"

namespace topknot {

class RunLock {
 public:
  // Throws UserError: the process that holds the directory, why the file cannot be made, or that what has its name is no
  // run's lock (a link, a file with other content), which stays as it is. Where a file system has no locks it warns and
  // goes on. Waits up to 10 s for the ranks of a process that has died.
  explicit RunLock(const std::string& directory);
  // For a rank: the lock that the process which started it holds for it. Throws UserError where it holds none any more.
  static RunLock of_parent(const std::string& directory);

  // Throws UserError where the file is no longer the one that is held.
  void check() const;

  static constexpr const char* kName = "run.lock";

 private:
  RunLock(std::string path, Fd file) : path_(std::move(path)), file_(std::move(file)) {}
  bool in_place() const;

  std::string path_;
  Fd file_;
};

// The process that runs in this directory, "process 4242 on node1"; "" where none does.
std::string running_process(const std::string& directory);

}  // namespace topknot
