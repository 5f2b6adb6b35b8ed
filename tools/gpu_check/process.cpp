#include "tools/gpu_check/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "nn/base/program.h"

extern char** environ;

namespace topknot::gpu_check {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kKept = 64 << 10;
constexpr std::chrono::seconds kKillGrace{5};            // for a killed program to be gone
constexpr std::chrono::milliseconds kRestOfOutput{300};  // for what is still in a pipe
constexpr int kNotStarted = 127;

struct Child {
  pid_t pid = -1;  // also of its process group
  int pipe = -1;
  bool running() const { return pid > 0; }
};

bool set_by_launcher(const std::string& name) {
  if (name == "RANK" || name == "WORLD_SIZE" || name == "LOCAL_RANK" || name == "LOCAL_WORLD_SIZE")
    return true;
  for (const std::string prefix :
       {"OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_", "TOPKNOT_RANK", "TORCHELASTIC_"})
    if (name.compare(0, prefix.size(), prefix) == 0) return true;
  return false;
}

// The environment as a program gets it, made before fork(): a child may not ask for memory.
std::vector<std::string> environment_of(const Command& command) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (!command.environment.count(name) && !set_by_launcher(name)) result.push_back(text);
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

void close_both(const int (&ends)[2]) {
  close(ends[0]);
  close(ends[1]);
}

// In the child, where only plain system calls may be made. Writes to `failed` why the program cannot be run.
[[noreturn]] void become(char* const* argv, char* const* envp, int output, int failed) {
  setpgid(0, 0);  // so that its children can be killed with it
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  // A terminal would stop a background group that reads from it.
  if (const int nothing = open("/dev/null", O_RDONLY); nothing >= 0) dup2(nothing, 0);
  dup2(output, 1);
  dup2(output, 2);
  execvpe(argv[0], argv, envp);
  const int why = errno;
  if (write(failed, &why, sizeof why) < 0) _exit(kNotStarted);
  _exit(kNotStarted);
}

Child start(const Command& command, Outcome& outcome) {
  std::vector<std::string> arguments = command.argv, environment = environment_of(command);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  const auto not_started = [&](int why) {
    outcome.output = command.argv.front() + " cannot be started: " + std::strerror(why);
  };
  int output[2], failed[2];
  if (pipe2(output, O_CLOEXEC) != 0) return not_started(errno), Child{};
  if (pipe2(failed, O_CLOEXEC) != 0) return not_started(errno), close_both(output), Child{};
  const pid_t pid = fork();
  if (pid == 0) become(argv.data(), envp.data(), output[1], failed[1]);
  if (pid < 0) return not_started(errno), close_both(output), close_both(failed), Child{};
  close(output[1]);
  close(failed[1]);
  int why = 0;
  ssize_t got;  // 0 as soon as the program runs
  while ((got = read(failed[0], &why, sizeof why)) < 0 && errno == EINTR) {
  }
  close(failed[0]);
  if (got != sizeof why) return {pid, output[0]};
  close(output[0]);
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  return not_started(why), Child{};
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

// Where it has ended: its group is killed while its number is still its own, then its status is collected.
void collect(Child& child, Outcome& outcome, Clock::time_point begin) {
  siginfo_t info{};
  if (!child.running() ||
      waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid != child.pid)
    return;
  kill(-child.pid, SIGKILL);
  int status = 0;
  waitpid(child.pid, &status, 0);
  child.pid = -1;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
}

// Reads the rest of an ended program's output. One that got away from its group may hold the pipe for ever.
void drain(Child& child, std::string& output) {
  const auto deadline = Clock::now() + kRestOfOutput;
  while (child.pipe >= 0 && Clock::now() < deadline) {
    pollfd one{child.pipe, POLLIN, 0};
    if (poll(&one, 1, 50) > 0) read_some(child, output);
  }
  if (child.pipe >= 0) close(child.pipe);
  child.pipe = -1;
  if (output.size() > kKept) output.erase(0, output.size() - kKept);
}

}  // namespace

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string Outcome::last_line() const {
  std::string last;
  for (std::string& line : lines_of(output)) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (const auto start = line.rfind('\r'); start != std::string::npos) line.erase(0, start + 1);
    if (line.find_first_not_of(" \t=~-.") != std::string::npos) last = line;
  }
  return last.substr(0, 300);
}

std::string Outcome::reason(const std::string& name) const {
  if (!found) return name + " is not there";
  const std::string last = last_line();
  if (timed_out) return "not done in its time" + (last.empty() ? "" : "; its last line: " + last);
  if (code > 128) return fmt::format("ended by signal {}{}{}", code - 128, last.empty() ? "" : ": ", last);
  return last.empty() ? fmt::format("exit status {}", code) : last;
}

std::vector<Outcome> run_all(const std::vector<Command>& commands, double seconds) {
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(std::max(0.0, seconds)));
  std::vector<Child> children;
  std::vector<Outcome> outcomes(commands.size());
  for (std::size_t i = 0; i < commands.size(); ++i) {
    outcomes[i].found = is_program(commands[i].argv.front());
    children.push_back(outcomes[i].found ? start(commands[i], outcomes[i]) : Child{});
  }
  bool killed = false;
  for (Clock::time_point give_up = Clock::time_point::max();;) {
    for (std::size_t i = 0; i < children.size(); ++i) collect(children[i], outcomes[i], begin);
    const auto now = Clock::now();
    if (std::none_of(children.begin(), children.end(), [](const Child& c) { return c.running(); })) break;
    if (now >= give_up) break;
    if (!killed && (now >= deadline || stop_signal() != 0)) {
      for (std::size_t i = 0; i < children.size(); ++i)
        if (children[i].running()) {
          outcomes[i].timed_out = true;
          outcomes[i].seconds = std::chrono::duration<double>(now - begin).count();
          kill(-children[i].pid, SIGKILL);
        }
      killed = true;
      give_up = now + kKillGrace;
    }
    std::vector<pollfd> polls;
    for (const Child& child : children)
      if (child.pipe >= 0) polls.push_back({child.pipe, POLLIN, 0});
    const auto until =
        std::chrono::duration_cast<std::chrono::milliseconds>((killed ? give_up : deadline) - now);
    poll(polls.data(), polls.size(), static_cast<int>(std::clamp<long long>(until.count(), 1, 20)));
    for (const pollfd& ready : polls)
      if (ready.revents != 0)
        for (std::size_t i = 0; i < children.size(); ++i)
          if (children[i].pipe == ready.fd) read_some(children[i], outcomes[i].output);
  }
  for (std::size_t i = 0; i < children.size(); ++i) drain(children[i], outcomes[i].output);
  if (stop_signal() != 0) throw Interrupted("stopped by a signal");
  return outcomes;
}

Outcome run(const Command& command, double seconds) {
  return run_all({command}, seconds).front();
}

bool is_program(const std::string& name) {
  const auto runs = [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) return runs(name);
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (runs((folder.empty() ? "." : folder) + "/" + name)) return true;
  return false;
}

std::string find_program(const std::string& name, const std::string& folder) {
  if (is_program(name)) return name;
  return is_program(folder + "/" + name) ? folder + "/" + name : "";
}

}  // namespace topknot::gpu_check
