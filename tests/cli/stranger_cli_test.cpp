// Real runs while strangers connect to their rendezvous, from before it listens until the run has ended.
// TOPKNOT_STRANGER_RUNS sets the number of runs.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include "dist/comm/communicator.h"
#include "dist/rendezvous/socket.h"
#include "nn/base/text.h"
#include "tests/cli/command.h"
#include "tests/support/free_port.h"

using namespace topknot;

namespace {

constexpr int kRanks = 4;

const std::string kRun =
    "model.name=mlp model.hidden=[32] data.train_size=256 data.test_size=32 data.batch_size=8 "
    "train.max_steps=300 train.epochs=99 optimizer.lr=1e-3 compress.name=topk compress.density=0.05 "
    "dist.backend=gloo dist.timeout_s=60 -q ";

// Visits a port in every way until it is told to stop; counts the connections that it made.
class Strangers {
 public:
  Strangers(int port, unsigned seed) : port_(port), random_(seed), thread_([this] { run(); }) {}
  ~Strangers() {
    if (thread_.joinable()) end();
  }
  int end() {
    stop_ = true;
    thread_.join();
    return connections_;
  }

 private:
  Fd visit() {
    try {
      Fd fd = connect_to("127.0.0.1", port_, Patience(0.001));
      ++connections_;
      return fd;
    } catch (const std::exception&) {
      return {};  // nobody listens, or no longer
    }
  }

  void send(std::string_view bytes) {
    const Fd fd = visit();
    if (!fd.valid()) return;
    write_all(fd.get(), bytes, deadline_in(1));
    held_.push_back(dup(fd.get()));  // some close at once, some stay a while
    if (held_.size() > 8) {
      close(held_.front());
      held_.erase(held_.begin());
    }
  }

  std::string noise() {
    std::string bytes(random_() % 5000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  void run() {
    const auto hello = [&](int rank, int size = kRanks, const std::string& token = "") {
      return encode_frame(Frame::hello, encode_hello({rank, size, token}));
    };
    const std::function<void(int rank)> ways[] = {
        [&](int) { send(noise()); },
        [&](int) { send("GET / HTTP/1.1\r\n\r\n"); },
        [&](int rank) { send(hello(rank).substr(0, random_() % 30)); },
        [&](int rank) { send(hello(rank, kRanks, "another job")); },
        [&](int rank) { send(hello(rank, kRanks + 1)); },
        [&](int rank) { send(hello(rank)); },
        [&](int rank) { send(hello(-1 - rank) + noise()); },
        [&](int) { send(encode_frame(Frame::abort, "\1" + noise().substr(0, 100))); },
        [&](int rank) {
          const Fd slow = visit();
          for (const char byte : hello(rank).substr(0, 20)) {
            if (slow.valid()) write_all(slow.get(), {&byte, 1}, deadline_in(1));
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
        },
        [&](int) {
          std::vector<Fd> many;
          for (int i = 0; i < 200 && !stop_; ++i) many.push_back(visit());
        }};
    while (!stop_) {
      ways[random_() % std::size(ways)](static_cast<int>(random_() % kRanks));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    for (const int fd : held_) close(fd);
  }

  const int port_;
  std::mt19937 random_;
  std::vector<int> held_;
  std::atomic<bool> stop_{false};
  std::atomic<int> connections_{0};
  std::thread thread_;
};

const std::string kTwoRanks =
    "model.name=mlp model.hidden=[8] data.train_size=64 data.test_size=16 data.batch_size=8 "
    "optimizer.lr=1e-3 train.device=cpu dist.ranks=2 dist.timeout_s=60 ";

}  // namespace

TEST_CASE("strangers at the rendezvous do not change a run") {
  const char* wanted = std::getenv("TOPKNOT_STRANGER_RUNS");
  const int runs = wanted ? std::atoi(wanted) : 2;
  const TempFolder temp;
  REQUIRE(train(kRun + "dist.ranks=" + std::to_string(kRanks) + " output.dir=" + temp.at("alone")).ended(0));
  const std::string checksum = checksum_of(temp.at("alone"));
  int unharmed = 0, connections = 0;
  for (int i = 0; i < runs; ++i) {
    const int port = free_port();
    const std::string folder = temp.at(std::to_string(i));
    Strangers strangers(port, static_cast<unsigned>(i));
    CommandOutcome outcome;
    if (i % 2 == 0) {
      outcome = train(kRun + "dist.ranks=" + std::to_string(kRanks) +
                      " dist.master=127.0.0.1:" + std::to_string(port) + " output.dir=" + folder);
    } else {
      // Rank 0 serves the rendezvous.
      std::string script =
          "codes=0; pids=; for r in 3 2 1 0; do OMPI_COMM_WORLD_SIZE=" + std::to_string(kRanks) +
          " OMPI_COMM_WORLD_RANK=$r TOPKNOT_TOKEN=stranger-test " TOPKNOT_BIN "/train " + kRun +
          "dist.master=127.0.0.1:" + std::to_string(port) + " output.dir=" + folder +
          " & pids=\"$pids $!\"; done; for p in $pids; do wait $p || codes=1; done; exit $codes";
      outcome = run_command(script);
    }
    connections += strangers.end();
    const std::string got = outcome.code == 0 ? checksum_of(folder) : "";
    INFO("run " << i << ": code " << outcome.code);
    CHECK(got == checksum);
    unharmed += got == checksum;
  }
  CHECK(connections > runs);
  if (wanted) std::printf("%d of %d runs unharmed by %d connections\n", unharmed, runs, connections);
}

TEST_CASE("a run with closed standard streams ends as any other, and no file has another's text") {
  for (const std::string backend : {"threads", "gloo"})
    for (const std::string closed : {"2>&-", ">&-", "<&-", "<&- >&- 2>&-"}) {
      const TempFolder temp;
      const std::string folder = temp.at("run");
      // run_command() adds 2>&1 behind the shell's own text.
      const CommandOutcome outcome = train(kTwoRanks + "train.max_steps=4 dist.backend=" + backend +
                                           " output.dir=" + folder + " " + closed);
      INFO(backend << " " << closed);
      CHECK(outcome.ended(0));
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
    check_outcome(run_command("ulimit -f 32; exec " TOPKNOT_BIN "/train " + kTwoRanks +
                              "train.epochs=200 train.checkpoint_keep=0 dist.backend=" + backend +
                              " output.dir=" + temp.at("run")),
                  2, {"metrics.jsonl", "File too large"});
  }
}

TEST_CASE("a stop signal that the parent has blocked is heard") {
  for (const std::string backend : {"threads", "gloo"}) {
    const TempFolder temp;
    const std::string metrics = temp.at("run/metrics.jsonl"), log = temp.at("log");
    const std::string command =
        std::string("exec " TOPKNOT_BIN "/train ") + kTwoRanks +
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
