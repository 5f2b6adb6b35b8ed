// What a user sees on a terminal: lines that fit it, colours, keys that are heard; and what goes to which
// stream.
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/cli/command.h"
#include "train/metrics/metrics.h"

using namespace topknot;

namespace {

// A program on a terminal of the test's own (a pty).
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
  // Whether `text` comes `times` times after position `from` of the output, before the program ends or the
  // test gives up.
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

// What was drawn between line breaks and returns of the cursor, without the sequences that move it or set
// colours.
std::vector<std::string> drawn(const std::string& output) {
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

const std::string kTrain = TOPKNOT_BIN "/train ";
const std::string kSmall =
    "model.name=mlp model.hidden=[16] data.train_size=256 data.test_size=32 data.batch_size=8 "
    "train.epochs=1000000 train.eval_every=0 optimizer.lr=1e-5 output.dir=";
constexpr const char* kCtrlC = "\x03";

// The widths of the lines that show progress, from position `from` of the output on.
std::vector<std::size_t> progress_widths(const std::string& output, std::size_t from = 0) {
  std::vector<std::size_t> widths;
  for (const std::string& line : drawn(output.substr(from)))
    if (contains(line, "step ") && contains(line, "left ")) widths.push_back(line.size());
  return widths;
}

std::size_t widest_line(const std::string& text) {
  std::size_t widest = 0;
  for (const std::string& line : drawn(text)) widest = std::max(widest, line.size());
  return widest;
}

}  // namespace

TEST_CASE("the progress line fits the terminal, also after a resize") {
  const TempFolder temp;
  Terminal terminal(kTrain + kSmall + temp.at("run"), 80);
  REQUIRE(terminal.wait_for("left ", 5));
  terminal.resize(60);
  const std::size_t resized = terminal.output().size();
  for (const std::size_t width : progress_widths(terminal.output())) CHECK(width < 80);
  // One line may have been under way for the old width.
  REQUIRE(terminal.wait_for("left ", 5, resized));
  const std::vector<std::size_t> after = progress_widths(terminal.output(), resized);
  for (std::size_t i = 1; i < after.size(); ++i) CHECK(after[i] < 60);
  CHECK(after.back() > 30);
  terminal.type(kCtrlC);
  CHECK(terminal.code() == 130);
  CHECK(says(terminal.output(), {"stopped by SIGINT after step"}));
}

TEST_CASE("Ctrl-C ends an evaluation, which shows how far it is; the evaluation is left to the next start") {
  for (const std::string backend : {"threads", "gloo"}) {
    const TempFolder temp;
    // The evaluation would take much longer than the test waits for the text.
    Terminal terminal(kTrain +
                          "model.name=resnet110 data.train_size=32 data.test_size=6000 data.batch_size=8 "
                          "train.max_steps=2 dist.ranks=2 dist.backend=" +
                          backend + " output.dir=" + temp.at("run"),
                      80);
    INFO(backend);
    REQUIRE(terminal.wait_for("evaluating, batch "));
    terminal.type(kCtrlC);
    CHECK(terminal.code() == 130);
    CHECK(says(terminal.output(), {"stopped by SIGINT after step 2"}));
    const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
    CHECK(metrics.evals.empty());
    CHECK_FALSE(metrics.end);
    CHECK(metrics.stop);
  }
}

TEST_CASE("the time left counts the evaluations to come") {
  const TempFolder temp;
  const CommandOutcome outcome = run_command(
      kTrain +
      "data.train_size=128 data.test_size=8000 data.batch_size=8 train.max_steps=4 train.threads=1 "
      "train.log_every=4 output.dir=" +
      temp.at("run"));
  // Of the step's line alone: the evaluation, which has a line where it takes seconds, counts down to 0:00.
  const std::size_t begin = outcome.output.find("step 4/4 ");
  REQUIRE(begin != std::string::npos);
  const std::string line = outcome.output.substr(begin, outcome.output.find('\n', begin) - begin);
  CHECK(contains(line, " left "));
  CHECK_FALSE(contains(line, "left 0:00"));
}

TEST_CASE("the result of a run goes to standard output, also with -q, and all else to standard error") {
  const TempFolder temp;
  const std::string run =
      kTrain + kSmall + temp.at("run") + " output.overwrite=true train.max_steps=9 train.log_every=3 ";
  for (const std::string how : {"", "-q ", "-q dist.ranks=2 dist.backend=gloo "}) {
    const CommandOutcome result = run_command(run + how + "2>/dev/null");
    CHECK(result.ended(0));
    CHECK(result.output.rfind("done: 9 steps in ", 0) == 0);
    CHECK(result.has("\ntest accuracy "));
    CHECK(result.count("\n") == 2);
  }
  const CommandOutcome rest = run_command(run + "1>/dev/null");
  CHECK(says(rest.output, {"step 9/9 ", "test accuracy "}));
  CHECK_FALSE(rest.has("done: "));
  CHECK(run_command(run + "-q 2>&1 1>/dev/null").output == "");
}

TEST_CASE("train --brief shows progress on one line; every line about time names an emulated link") {
  const TempFolder temp;
  const std::string run = kTrain + kSmall + temp.at("run") +
                          " output.overwrite=true train.max_steps=9 train.log_every=3 dist.ranks=2 "
                          "dist.link.rate=1gbit ";
  Terminal terminal(run + "--brief", 100);
  CHECK(terminal.code() == 0);
  INFO(terminal.output());
  std::size_t lines = 0;
  for (const std::string& line : drawn(terminal.output())) {
    lines += contains(line, "parameters");
    if (contains(line, "images/s")) CHECK(contains(line, "emulated link"));
  }
  CHECK(lines == 0);
  CHECK(says(terminal.output(), {"step 9/9", "images/s by threads, emulated link 1gbit, 50us, sent "}));
  CHECK(run_command(run + "--brief 2>&1 1>/dev/null").output == "");
  const CommandOutcome plain = run_command(run + "1>/dev/null");
  CHECK(plain.count("emulated link") == 1 + plain.count("images/s"));
  CHECK(plain.count("images/s") == 3);
}

TEST_CASE("warnings and errors have a colour on a terminal, unless NO_COLOR says no") {
  const TempFolder temp;
  const std::string warning = kTrain + kSmall + temp.at("run") +
                              " output.overwrite=true train.max_steps=2 compress.mu=3 compress.name=topk";
  for (const bool plain : {false, true}) {
    const std::string environment = plain ? "env NO_COLOR=1 " : "env -u NO_COLOR ";
    Terminal warned(environment + warning, 80), refused(environment + kTrain + "model.name=resnet", 80);
    CHECK(warned.code() == 0);
    CHECK(refused.code() == 2);
    CHECK(
        contains(warned.output(), plain ? "warning: compress.mu" : "\033[1;33mwarning: \033[0mcompress.mu"));
    CHECK(contains(refused.output(), plain ? "error: model.name" : "\033[1;31merror: \033[0mmodel.name"));
  }
  CHECK_FALSE(run_command(warning).has("\033"));
}

TEST_CASE("help is as wide as the terminal, and 80 columns where there is none") {
  for (const std::string what : {"--help", "--list compressors", "--list models", "--help exchange"}) {
    INFO(what);
    CHECK(widest_line(train(what).output) <= 80);
    Terminal wide(kTrain + what, 120);
    CHECK(wide.code() == 0);
    CHECK(widest_line(wide.output()) <= 120);
    CHECK(widest_line(wide.output()) > 80);
  }
  Terminal narrow(kTrain + "--help compress", 60);
  CHECK(narrow.code() == 0);
  CHECK(widest_line(narrow.output()) <= 60);
}

TEST_CASE("train --list configs names the shipped files, also if copied, or says where it looked") {
  check_outcome(train("--list configs"), 0,
                {"cifar10_resnet20_topk.yaml\n    ResNet-20 on CIFAR-10, TopK-SGD with error feedback.\n",
                 "gpt_char.yaml\n"});
  const TempFolder temp;
  const std::string folder = temp.at("a/b/bin");
  std::filesystem::create_directories(folder);
  std::filesystem::copy_file(TOPKNOT_BIN "/train", folder + "/train");
  const std::string copied = "cd " + folder + " && ./train --list configs";
  check_refused(run_command(copied),
                {"no .yaml file", temp.at("a/configs").c_str(), temp.at("a/b/configs").c_str()});
  const std::string text = "# A first line. And more.\nseed: 1\n";
  temp.write("a/b/configs/mine.yaml", {text.begin(), text.end()});
  check_outcome(run_command(copied), 0,
                {"configurations in " + temp.at("a/b/configs") + ":", "mine.yaml\n    A first line.\n"});
}
