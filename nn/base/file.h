#pragma once
// Files: a descriptor that closes itself, files that must be regular ones, small text files that a user
// names, and files that are written next to what they will replace.

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <utility>

namespace topknot {

// A file descriptor that is closed at the end of its scope.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;  // none
};

// "a folder", "a named pipe", "a socket", "a device"; "" for a regular file. Others may never open or end.
std::string special_file_kind(const struct stat& status);

// Opens `path` for reading, close-on-exec. UserError "cannot open 'PATH': REASON": it is no regular file
// (which is seen before it is opened), absent, or not permitted.
Fd open_regular_file(const std::string& path);

// The whole content of a small text file (a configuration, a profile, a table): a regular file, or a pipe
// that the shell opened for this program (/dev/stdin, /dev/fd/N), which has a minute to deliver it. UserError
// "PATH: REASON HINT": absent, a read error, a folder, a device, a named pipe, more than `most_bytes`.
std::string read_text_file(const std::string& path, std::size_t most_bytes, const std::string& hint = "");

// A regular file of any size, to be read line by line. Throws UserError as open_regular_file().
std::ifstream open_stream(const std::string& path);

struct NewFile {
  Fd fd;  // invalid, with errno, where the file cannot be made
  std::string path;
};

// Makes "TARGET.part-NUMBER", open for writing. The number is random; no file or link of the name is opened.
NewFile create_part_file(const std::string& target);

}  // namespace topknot
