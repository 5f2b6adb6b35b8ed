#include "train/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <optional>
#include <thread>

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// What the holder wrote: "PID HOST". Not yet written: pid 0.
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

constexpr std::size_t kMostBytes = 300;

// Nothing where another program wrote it.
std::optional<Holder> read_holder(int file) {
  char text[kMostBytes + 1] = "", host[256] = "";
  const ssize_t size = pread(file, text, kMostBytes, 0);
  Holder holder;
  // Empty, or full of zeros where the machine lost its power: nobody holds it.
  if (size >= 0 && std::all_of(text, text + size, [](char c) { return c == 0; })) return holder;
  int end = 0;
  if (size < 0 || std::sscanf(text, "%d %255[^\n]%*1[\n]%n", &holder.pid, host, &end) != 2 || end != size)
    return {};
  holder.host = host;
  return holder;
}

std::string lock_path(const std::string& directory) {
  return directory + "/" + RunLock::kName;
}

// A link is not followed, and a named pipe not waited for.
Fd open_lock(const std::string& path, int flags) {
  errno = 0;
  return Fd(open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK, 0666));
}

[[noreturn]] void refuse_lock(const std::string& path, const std::string& what) {
  throw UserError(fmt::format(
      "output.dir: {} {}; choose another output.dir, or remove that file if no run uses the folder", path,
      what));
}

// Throws for what is no run's lock: nothing is to be written into it.
void check_lock_file(const Fd& file, const std::string& path) {
  if (!file.valid() && errno != ELOOP && errno != EISDIR && errno != ENXIO)
    refuse_lock(path, "cannot be written: " + errno_text());
  struct stat status {};
  if (file.valid() && fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode))
    if (const auto holder = read_holder(file.get()))
      if (holder->pid > 0 || status.st_nlink <= 1) return;  // a second name is as good as a link
  refuse_lock(path, "is no lock of a run, but a link or a file of another program");
}

}  // namespace

RunLock::RunLock(const std::string& directory) : path_(lock_path(directory)) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  // Not closed on exec: the ranks that a launcher starts hold the lock too.
  const auto open_file = [&] {
    file_ = open_lock(path_, O_RDWR | O_CREAT);
    check_lock_file(file_, path_);
  };
  open_file();
  while (true) {
    if (flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
      if (in_place()) break;
      open_file();  // removed meanwhile
    } else if (errno != EWOULDBLOCK && errno != EINTR) {
      log_warning(
          fmt::format("output.dir: {} cannot be locked ({}); a second run in there would not be noticed",
                      directory, errno_text()));
      break;
    }
    const Holder holder = read_holder(file_.get()).value_or(Holder());
    // running_process() holds the lock for a moment.
    const auto patience = std::chrono::milliseconds(holder.has_died() ? 10000 : 300);
    if (Clock::now() - start > patience)
      throw UserError(
          fmt::format("output.dir: {} is in use by {}; choose another output.dir, or wait for its end",
                      directory, holder.text()));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  check_lock_file(file_, path_);
  const std::string text = fmt::format("{} {}\n", getpid(), host_name());
  if (ftruncate(file_.get(), 0) != 0 || pwrite(file_.get(), text.data(), text.size(), 0) < 0)
    refuse_lock(path_, "cannot be written: " + errno_text());
}

RunLock RunLock::of_parent(const std::string& directory) {
  RunLock lock(lock_path(directory), open_lock(lock_path(directory), O_RDONLY | O_CLOEXEC));
  const std::optional<Holder> holder = lock.file_.valid() ? read_holder(lock.file_.get()) : std::nullopt;
  if (!holder || holder->pid != getppid()) lock.file_.reset();
  lock.check();
  return lock;
}

bool RunLock::in_place() const {
  struct stat held {
  }, there{};
  return fstat(file_.get(), &held) == 0 && lstat(path_.c_str(), &there) == 0 && held.st_dev == there.st_dev &&
         held.st_ino == there.st_ino;
}

void RunLock::check() const {
  if (!in_place())
    throw UserError(
        path_ +
        ": the file is gone: deleted, moved or replaced while the run was holding it; another run may write "
        "this directory now, so this one ends; what it has written is kept");
}

std::string running_process(const std::string& directory) {
  const Fd file = open_lock(lock_path(directory), O_RDONLY | O_CLOEXEC);
  const std::optional<Holder> holder = file.valid() ? read_holder(file.get()) : std::nullopt;
  if (!holder) return "";
  const bool held = flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return held ? holder->text() : "";
}

}  // namespace topknot
