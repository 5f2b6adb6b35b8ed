#include "train/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <thread>

#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "nn/core/base/text.h"

namespace topknot {
namespace {

// What the holder wrote: "PID HOST". Not yet written, or by another program: pid 0.
struct Holder {
  int pid = 0;
  std::string host;
  std::string text() const {
    return pid > 0 ? fmt::format("process {} on {}", pid, host) : std::string("another process");
  }
  // Also where nobody has waited for it yet (a zombie).
  bool has_died() const {
    if (pid <= 0 || host != host_name()) return false;
    std::string state;
    std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), state);
    const auto name_end = state.rfind(") ");
    return name_end == std::string::npos ? kill(pid, 0) != 0 && errno == ESRCH : state[name_end + 2] == 'Z';
  }
};

Holder read_holder(int file) {
  char text[300] = "";
  const ssize_t size = pread(file, text, sizeof text - 1, 0);
  text[size > 0 ? size : 0] = 0;
  Holder holder;
  char host[256] = "";
  if (std::sscanf(text, "%d %255[-.A-Za-z0-9_]", &holder.pid, host) == 2)
    holder.host = host;
  else
    holder.pid = 0;
  return holder;
}

}  // namespace

RunLock::RunLock(const std::string& directory) {
  const std::string path = directory + "/" + kName;
  // Not closed on exec: the ranks that a launcher starts hold the lock too.
  file_.reset(open(path.c_str(), O_RDWR | O_CREAT, 0666));
  if (!file_.valid()) throw UserError("output.dir: " + path + " cannot be written: " + errno_text());
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      log_warning(
          fmt::format("output.dir: {} cannot be locked ({}); a second run in there would not be noticed",
                      directory, errno_text()));
      break;
    }
    const Holder holder = read_holder(file_.get());
    // running_process() holds the lock for a moment.
    const auto patience = std::chrono::milliseconds(holder.has_died() ? 10000 : 300);
    if (Clock::now() - start > patience)
      throw UserError(
          fmt::format("output.dir: {} is in use by {}; choose another output.dir, or wait for its end",
                      directory, holder.text()));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string text = fmt::format("{} {}\n", getpid(), host_name());
  if (ftruncate(file_.get(), 0) != 0 || pwrite(file_.get(), text.data(), text.size(), 0) < 0)
    throw UserError("output.dir: " + path + " cannot be written: " + errno_text());
}

std::string running_process(const std::string& directory) {
  const Fd file(open((directory + "/" + RunLock::kName).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return "";
  const bool held = flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return held ? read_holder(file.get()).text() : "";
}

}  // namespace topknot
