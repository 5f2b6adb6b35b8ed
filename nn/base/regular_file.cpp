#include "nn/base/regular_file.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {

std::string special_file_kind(const struct stat& status) {
  if (S_ISREG(status.st_mode)) return "";
  if (S_ISDIR(status.st_mode)) return "a folder";
  if (S_ISFIFO(status.st_mode)) return "a named pipe";
  return S_ISSOCK(status.st_mode) ? "a socket" : "a device";
}

Fd open_regular_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw UserError(fmt::format("cannot open '{}': {}", printable(path), why));
  };
  const auto check = [&](int failed, const struct stat& status) {
    if (failed) refuse(errno_text() + "; check its path and permissions");
    if (const std::string kind = special_file_kind(status); !kind.empty())
      refuse(fmt::format("it is {}, not a regular file", kind));
  };
  struct stat status {};
  check(stat(path.c_str(), &status), status);
  // Between the two calls another file may have taken the name: O_NONBLOCK does not wait for a pipe's writer.
  Fd file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  check(!file.valid() || fstat(file.get(), &status) != 0, status);
  return file;
}

}  // namespace topknot
