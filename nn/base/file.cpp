#include "nn/base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>

#include <cerrno>
#include <chrono>
#include <cstdint>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// A pipe by such a name is open at its other end already.
bool is_open_pipe(const std::string& path) {
  return path == "/dev/stdin" || path.rfind("/dev/fd/", 0) == 0 || path.rfind("/proc/self/fd/", 0) == 0;
}

// The message for a file of this kind; "" for one to be read.
std::string kind_problem(const struct stat& status, const std::string& path) {
  const std::string kind = special_file_kind(status);
  if (kind.empty() || (S_ISFIFO(status.st_mode) && is_open_pipe(path))) return "";
  return fmt::format("this is {}; give a regular file", kind);
}

}  // namespace

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

std::string read_text_file(const std::string& path, std::size_t most_bytes, const std::string& hint) {
  const auto fail = [&](const std::string& why) { throw UserError(path + ": " + why + hint); };
  errno = 0;
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  const Fd file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!file.valid() || fstat(file.get(), &status) != 0) fail("cannot be read: " + errno_text());
  if (const std::string problem = kind_problem(status, path); !problem.empty()) fail(problem);

  constexpr int kPipeSeconds = 60;
  const Deadline deadline = Clock::now() + std::chrono::seconds(kPipeSeconds);
  std::string text;
  char buffer[1 << 14];
  while (true) {
    const ssize_t got = read(file.get(), buffer, sizeof buffer);
    if (got == 0) return text;
    if (got > 0) {
      text.append(buffer, static_cast<std::size_t>(got));
      if (text.size() > most_bytes)
        fail(fmt::format("larger than {}, so it cannot be what it should be",
                         format_bytes(static_cast<double>(most_bytes))));
    } else if (errno == EAGAIN) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) fail(fmt::format("a pipe that did not end within {} s", kPipeSeconds));
      pollfd wanted{file.get(), POLLIN, 0};
      poll(&wanted, 1, static_cast<int>(left.count()));
    } else if (errno != EINTR) {
      fail("cannot be read: " + errno_text());
    }
  }
}

std::ifstream open_stream(const std::string& path) {
  open_regular_file(path);  // what it refuses might never open
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw UserError(path + ": cannot be read: " + errno_text());
  return stream;
}

NewFile create_part_file(const std::string& target) {
  NewFile file;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::uint32_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number) break;
    file.path = fmt::format("{}.part-{}", target, number);
    file.fd.reset(open(file.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.fd.valid() || errno != EEXIST) break;
  }
  return file;
}

}  // namespace topknot
