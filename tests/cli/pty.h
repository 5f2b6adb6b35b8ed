#pragma once
// A program on a terminal of the test's own (a pty).

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace topknot {

class Terminal {
 public:
  // Starts `command` in a shell, as its one process.
  Terminal(const std::string& command, int columns) {
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    child_ = forkpty(&master_, nullptr, nullptr, &size);
    if (child_ == 0) {
      setenv("TERM", "xterm", 1);
      execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
      _exit(127);
    }
    REQUIRE(child_ > 0);
    fcntl(master_, F_SETFL, O_NONBLOCK);
  }
  Terminal(const Terminal&) = delete;
  ~Terminal() {
    if (code_ < 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    close(master_);
  }

  const std::string& output() const { return output_; }
  // Whether `text` comes `times` times after position `from` of the output, before the program ends or the test gives up.
  bool wait_for(const std::string& text, int times = 1, std::size_t from = 0) {
    const auto come = [&] {
      int found = 0;
      for (auto at = output_.find(text, from); at != std::string::npos; at = output_.find(text, at + 1))
        ++found;
      return found >= times;
    };
    while (!come() && read_more()) {
    }
    return come();
  }
  void type(const std::string& keys) {
    CHECK(write(master_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()));
  }
  // The program stands still meanwhile, and what it wrote for the old size is in output().
  void resize(int columns) {
    kill(child_, SIGSTOP);
    int status = 0;
    REQUIRE(waitpid(child_, &status, WUNTRACED) == child_);
    while (read_now()) {
    }
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    REQUIRE(ioctl(master_, TIOCSWINSZ, &size) == 0);
    kill(child_, SIGCONT);
  }
  // Of the program once it has ended: its exit code, or 128 + the signal.
  int code() {
    while (read_more()) {
    }
    if (ended_ && code_ < 0) {
      int status = 0;
      waitpid(child_, &status, 0);
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return code_;
  }

 private:
  static constexpr auto kDeadline = std::chrono::seconds(120);  // of the whole test

  bool read_now() {
    char buffer[4096];
    const ssize_t n = read(master_, buffer, sizeof buffer);
    if (n > 0) output_.append(buffer, static_cast<std::size_t>(n));
    ended_ = ended_ || n == 0 || (n < 0 && errno == EIO);
    return n > 0;
  }
  // False when the program has ended or the deadline has passed.
  bool read_more() {
    if (ended_ || std::chrono::steady_clock::now() - start_ > kDeadline) return false;
    pollfd wait{master_, POLLIN, 0};
    poll(&wait, 1, 200);
    read_now();
    return !ended_;
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int master_ = -1, code_ = -1;
  pid_t child_ = -1;
  bool ended_ = false;
  std::string output_;
};

// What was drawn between line breaks and returns of the cursor, without the sequences that move it or set colours.
inline std::vector<std::string> drawn(const std::string& output) {
  std::vector<std::string> lines(1);
  for (std::size_t i = 0; i < output.size(); ++i) {
    if (output[i] == '\033') {
      while (i < output.size() && !std::isalpha(static_cast<unsigned char>(output[i]))) ++i;
    } else if (output[i] == '\r' || output[i] == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += output[i];
    }
  }
  return lines;
}

}  // namespace topknot
