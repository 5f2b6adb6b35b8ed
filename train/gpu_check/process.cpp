#include "train/gpu_check/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>

extern char** environ;

namespace topknot::gpu_check {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kKept = 64 << 10;

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  bool reaped = false;
};

// The environment as a program gets it, made before fork(): a child may not ask for memory.
std::vector<std::string> environment_of(const Command& command) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!command.environment.count(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : command.environment) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

Child start(const Command& command) {
  std::vector<std::string> arguments = command.argv, environment = environment_of(command);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {};
  Child child;
  child.pid = fork();
  if (child.pid == 0) {
    setpgid(0, 0);  // so that its children can be killed with it
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(ends[1]);
  child.pipe = ends[0];
  return child;
}

void read_some(Child& child, std::string& output) {
  char buffer[8192];
  const ssize_t got = read(child.pipe, buffer, sizeof buffer);
  if (got > 0) {
    output.append(buffer, static_cast<std::size_t>(got));
    if (output.size() > 2 * kKept) output.erase(0, output.size() - kKept);
  } else if (got == 0 || errno != EINTR) {
    close(child.pipe);
    child.pipe = -1;
  }
}

void reap(Child& child, Outcome& outcome, Clock::time_point begin, int flags) {
  int status = 0;
  if (child.reaped || child.pid < 0 || waitpid(child.pid, &status, flags) != child.pid) return;
  child.reaped = true;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

std::string Outcome::last_line() const {
  std::istringstream lines(output);
  std::string last;
  for (std::string line; std::getline(lines, line);)
    if (line.find_first_not_of(" \t\r=~") != std::string::npos) last = line;
  return last.substr(0, 300);
}

std::vector<Outcome> run_all(const std::vector<Command>& commands, double seconds) {
  const auto begin = Clock::now();
  const auto deadline =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<Child> children;
  std::vector<Outcome> outcomes(commands.size());
  for (std::size_t i = 0; i < commands.size(); ++i) {
    outcomes[i].found = is_program(commands[i].argv.front());
    children.push_back(outcomes[i].found ? start(commands[i]) : Child{});
  }
  for (bool killed = false;;) {
    bool alive = false;
    std::vector<pollfd> polls;
    for (std::size_t i = 0; i < children.size(); ++i) {
      reap(children[i], outcomes[i], begin, WNOHANG);
      alive |= children[i].pid >= 0 && !children[i].reaped;
      if (children[i].pipe >= 0) polls.push_back({children[i].pipe, POLLIN, 0});
    }
    if (!alive) break;
    if (!killed && Clock::now() >= deadline) {
      for (std::size_t i = 0; i < children.size(); ++i)
        if (children[i].pid >= 0 && !children[i].reaped) {
          outcomes[i].timed_out = true;
          kill(-children[i].pid, SIGKILL);
        }
      killed = true;
    }
    poll(polls.data(), polls.size(), 50);
    for (const pollfd& ready : polls)
      if (ready.revents != 0)
        for (std::size_t i = 0; i < children.size(); ++i)
          if (children[i].pipe == ready.fd) read_some(children[i], outcomes[i].output);
  }
  for (std::size_t i = 0; i < children.size(); ++i) {
    // What it still had to say; a grandchild that keeps the pipe open does not hold us up.
    for (pollfd one{children[i].pipe, POLLIN, 0}; children[i].pipe >= 0 && poll(&one, 1, 100) > 0;)
      read_some(children[i], outcomes[i].output);
    if (children[i].pipe >= 0) close(children[i].pipe);
    if (outcomes[i].output.size() > kKept) outcomes[i].output.erase(0, outcomes[i].output.size() - kKept);
  }
  return outcomes;
}

Outcome run(const Command& command, double seconds) {
  return run_all({command}, seconds).front();
}

bool is_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  return false;
}

}  // namespace topknot::gpu_check
