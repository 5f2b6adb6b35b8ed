// What a program may be started with: standard streams that are closed, a limit of file sizes, signals that are blocked.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "nn/base/text.h"
#include "tests/cli/command.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"

using namespace topknot;

namespace {

const std::string kRun =
    "model.name=mlp model.hidden=[8] data.train_size=64 data.test_size=16 data.batch_size=8 "
    "optimizer.lr=1e-3 "
    "train.device=cpu dist.ranks=2 dist.timeout_s=60 ";

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE(
    "a run whose standard streams are closed ends as any other, and none of its files has another's text") {
  for (const std::string backend : {"threads", "gloo"})
    for (const std::string closed : {"2>&-", ">&-", "<&-", "<&- >&- 2>&-"}) {
      const TempFolder temp;
      const std::string folder = temp.at("run");
      // run_command() adds 2>&1 behind the shell's own text.
      const CommandOutcome outcome =
          train(kRun + "train.max_steps=4 dist.backend=" + backend + " output.dir=" + folder + " " + closed);
      INFO(backend << " " << closed << ": " << outcome.output);
      CHECK(outcome.code == 0);
      const Metrics metrics = read_metrics(folder + "/metrics.jsonl");
      CHECK(metrics.steps.size() == 4);
      CHECK(metrics.end.has_value());
      std::istringstream lines(text_of(folder + "/metrics.jsonl"));
      for (std::string line; std::getline(lines, line);) CHECK(line.starts_with("{\"event\":"));
      int pid = 0;
      std::string host, more;
      std::istringstream(text_of(folder + "/run.lock")) >> pid >> host >> more;
      CHECK(pid > 0);
      CHECK(host == host_name());
      CHECK(more.empty());
    }
}

TEST_CASE("a file that would be larger than ulimit -f allows is named, and the run ends with 2") {
  for (const std::string backend : {"threads", "gloo"}) {
    const TempFolder temp;
    // Blocks of 512 bytes: enough for config.yaml, too few for the metrics.
    const CommandOutcome outcome = run_command(
        "ulimit -f 32; exec " TOPKNOT_BIN "/train " + kRun +
        "train.epochs=200 train.checkpoint_keep=0 dist.backend=" + backend + " output.dir=" + temp.at("run"));
    INFO(outcome.output);
    CHECK(outcome.code == 2);
    CHECK(outcome.has("metrics.jsonl"));
    CHECK(outcome.has("File too large"));
  }
}

TEST_CASE("a stop signal that the parent has blocked is heard") {
  for (const std::string backend : {"threads", "gloo"}) {
    const TempFolder temp;
    const std::string metrics = temp.at("run/metrics.jsonl"), log = temp.at("log");
    const std::string command =
        std::string("exec " TOPKNOT_BIN "/train ") + kRun +
        "train.epochs=100000 train.eval_every=0 train.checkpoint_every=0 dist.backend=" + backend +
        " output.dir=" + temp.at("run") + " >" + log + " 2>&1";
    const pid_t child = fork();
    if (child == 0) {
      sigset_t blocked;
      sigemptyset(&blocked);
      sigaddset(&blocked, SIGTERM);
      sigprocmask(SIG_BLOCK, &blocked, nullptr);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(99);
    }
    for (int i = 0; i < 1200 && text_of(metrics).find("\"event\":\"step\"") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    kill(child, SIGTERM);
    int status = 0;
    for (int i = 0; i < 1200 && waitpid(child, &status, WNOHANG) == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (i == 1199) kill(child, SIGKILL), waitpid(child, &status, 0);
    }
    INFO(backend << ": " << text_of(log));
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGTERM));
  }
}
