// Bad input and a bad environment: one clear message, a non-zero exit, no damage.
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include "nn/base/text.h"
#include "tests/cli/command.h"

using namespace topknot;

namespace {

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

const std::string kTwoRanks =
    "model.name=mlp model.hidden=[8] data.train_size=64 data.test_size=16 data.batch_size=8 "
    "optimizer.lr=1e-3 train.device=cpu dist.ranks=2 dist.timeout_s=60 ";

}  // namespace

// Which ones there are and what is said of them: tests/train/config.
TEST_CASE("a mistake in a file, a key, a value, a name or between keys ends a run before it begins") {
  const TempFolder temp;
  temp.write("c.yaml", bytes_of("model:\n  nmae: resnet20\n"));
  check_refused(train(temp.at("c.yaml")), {"model.nmae", "model.name", "c.yaml:2:3"});
  check_refused(train("optimiser.lr=0.1"), {"optimiser.lr", "did you mean", "optimizer.lr"});
  check_refused(train("compress.name=top_k"), {"top_k", "did you mean", "topk"});
  check_refused(train("compress.name=topk compress.scope=model exchange.merge=none"),
                {"compress.scope", "exchange.merge"});
}

TEST_CASE("a file that is no configuration is refused with one message: empty, binary, a folder") {
  const TempFolder temp;
  temp.write("empty.yaml", {});
  temp.write("comments.yaml", bytes_of("# nothing\n\n"));
  temp.write("utf16.yaml", {0xff, 0xfe, 0x00});
  temp.write("program.yaml", {0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0});
  temp.write("noise.yaml", {0x80, 0xfe, 0xc3, 0x28, '\n', 0xff});
  temp.write("word.yaml", bytes_of("resnet20\n"));
  std::filesystem::create_directory(temp.at("folder.yaml"));
  for (const auto& [file, word] : {std::pair("empty.yaml", "no keys"), std::pair("comments.yaml", "no keys"),
                                   std::pair("utf16.yaml", "not UTF-8"), std::pair("program.yaml", "binary"),
                                   std::pair("noise.yaml", "noise.yaml"), std::pair("word.yaml", "sections"),
                                   std::pair("folder.yaml", "folder")}) {
    const CommandOutcome outcome = train(temp.at(file) + " train.max_steps=1 output.dir=" + temp.at("run"));
    check_refused(outcome, {file, word});
    CHECK(outcome.ended(2));
  }
  CHECK_FALSE(std::filesystem::exists(temp.at("run")));
}

// What is wrong with which file: tests/data.
TEST_CASE("missing and damaged data are refused and leave no run directory") {
  const TempFolder temp;
  const std::string run = " output.dir=" + temp.at("run");
  check_refused(train("data.name=cifar10 data.root=" + temp.at("nowhere") + run), {"nowhere", "fetch-data"});
  for (const char* name : {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                           "data_batch_5.bin", "test_batch.bin"})
    temp.write(name, std::vector<std::uint8_t>(10 * 3073, 7));
  check_refused(train("data.name=cifar10 data.root=" + temp.str() + run), {"data_batch_1.bin", "truncated"});
  CHECK_FALSE(std::filesystem::exists(temp.at("run")));
}

TEST_CASE("a run directory that cannot be written is refused") {
  check_refused(train("model.name=linear train.max_steps=1 output.dir=/proc/topknot-run"),
                {"/proc/topknot-run"});
}

TEST_CASE("where memory runs out a run says what it was for, and never dies of a signal") {
#ifdef __SANITIZE_ADDRESS__
  WARN("skipped: the address sanitizer needs more address space than any limit leaves");
#else
  // From too little for anything up to enough; what is needed depends on the libraries.
  int said = 0, done = 0;
  for (int megabytes = 100; megabytes < 8000 && done < 2; megabytes += megabytes / 8) {
    // The start of the program's own libraries, with something to spare: cuBLAS's dies of a signal.
    if (run_command("ulimit -v " + std::to_string(megabytes * 1000 - 32000) +
                    "; " TOPKNOT_BIN "/train --version")
            .code != 0)
      continue;
    const TempFolder temp;
    const CommandOutcome outcome =
        run_command("ulimit -v " + std::to_string(megabytes * 1000) +
                    "; " TOPKNOT_BIN
                    "/train model.name=resnet20 data.train_size=20000 data.test_size=100 train.max_steps=1 "
                    "train.eval_every=0 train.threads=1 output.dir=" +
                    temp.at("run"));
    INFO(megabytes << " MB: " << outcome.output);
    CHECK(outcome.code <= 2);
    CHECK_FALSE(outcome.has("bad_alloc"));
    said += outcome.has("error: out of memory: ");
    done += outcome.code == 0;
  }
  CHECK(said > 0);
  CHECK(done == 2);
#endif
}

TEST_CASE("an address space too small for what is known of a run is refused before the run begins") {
#ifdef __SANITIZE_ADDRESS__
  WARN("skipped: the address sanitizer needs more address space than any limit leaves");
#else
  const TempFolder temp;
  const std::string run = TOPKNOT_BIN
                          "/train model.name=linear data.train_size=64 data.test_size=16 output.dir=" +
                          temp.at("run");
  for (const char* limit : {"-v", "-d"})
    check_refused(
        run_command(std::string("ulimit ") + limit + " 4000000; " + run + " train.threads=1000"),
        {"out of memory: the process needs ", "of the stacks of threads", "ulimit -v", "train.threads"});
  CHECK_FALSE(std::filesystem::exists(temp.at("run")));
#endif
}

TEST_CASE("stacks that are too small or larger than the memory are refused by the name of their limit") {
  const std::string run = TOPKNOT_BIN "/train model.name=linear data.train_size=64 --validate";
  check_refused(run_command("ulimit -s 64; " + run), {"ulimit -s", "64 KiB"});
  for (const char* size : {"16k", "100B", "1000000G", "64"})
    check_refused(run_command(std::string("OMP_STACKSIZE=") + size + " " + run),
                  {"OMP_STACKSIZE", size, "unset it"});
  for (const char* size : {"256k", "2M", "1g", " 4096 "})
    CHECK(run_command(std::string("OMP_STACKSIZE='") + size + "' " + run).ended(0));
}

TEST_CASE("what no machine can hold is refused before it is tried") {
  check_refused(
      train("--validate model.name=mlp model.hidden=[1000000,1000000] data.train_size=64 data.test_size=16"),
      {"out of memory: the weights, gradients and residuals of the model", "TB"});
  check_refused(train("data.train_size=1000000000"), {"data.train_size", "3.07 TB"});
  check_refused(train("data.name=synthetic_regression model.name=linear data.test_size=1000000000"),
                {"data.test_size", "260 GB"});
  const std::string small =
      "data.train_size=2000 data.test_size=10 data.image_size=8 dist.ranks=1024 train.device=cpu ";
  check_refused(train(small + "data.workers=256"), {"1024 ranks with data.workers=256 need 526336 threads"});
  check_refused(train(small + "data.workers=0 data.batch_size=1000000 dist.backend=gloo"),
                {"1024 ranks on this machine", "768 MB of batches per rank"});
}

TEST_CASE("a training that diverges ends with exit code 3 and one sentence, during its steps or at the end") {
  for (const char* backend : {"threads", "gloo"})
    for (const char* limit : {"train.max_skips=2", "train.max_skips=100"}) {
      const TempFolder temp;
      const CommandOutcome outcome = train(
          std::string(
              "model.name=mlp model.hidden=[16] data.train_size=256 data.test_size=32 data.batch_size=8 "
              "train.max_steps=10 optimizer.lr=1e6 dist.ranks=2 dist.backend=") +
          backend + " " + limit + " output.dir=" + temp.at("run"));
      INFO(backend << " " << limit);
      check_outcome(outcome, 3, {"training has diverged: "}, {"done: "});
      CHECK(train("status " + temp.at("run")).has("failed at "));
      CHECK(std::filesystem::exists(temp.at("run/checkpoints")) == (limit[16] == '1'));
    }
}

TEST_CASE("a program that cannot write its standard output fails and says so") {
  if (!std::filesystem::exists("/dev/full")) {
    WARN("skipped: this system has no /dev/full");
    return;
  }
  for (const char* command :
       {"train --help", "train --list models", "train --version", "train --dump-config",
        "train model.name=linear --validate", "train model.name=linear --dry-run", "gpu-check --help"}) {
    const CommandOutcome outcome = run_command(std::string(TOPKNOT_BIN "/") + command + " > /dev/full");
    INFO(command);
    check_outcome(outcome, 2, {"standard output cannot be written: "});
  }
}

TEST_CASE("all problems at once: what --validate reports") {
  const CommandOutcome outcome = train("--validate train.epochs=x optimizer.lr=-1 model.nmae=linear");
  CHECK(outcome.ended(2));
  for (const char* key : {"train.epochs", "optimizer.lr", "model.nmae"}) CHECK(outcome.has(key));
  CHECK(train("--validate model.name=linear").ended(0));
  CHECK(train("--validate data.name=cifar10 data.root=/nowhere").ended(2));
  // A problem of the command line hides neither those across keys nor those of the data, the model and the
  // machine.
  const auto check_all = [](const std::string& keys, std::initializer_list<const char*> parts) {
    const CommandOutcome found =
        run_command("CUDA_VISIBLE_DEVICES= " TOPKNOT_BIN "/train --validate " + keys);
    check_outcome(found, 2, {"error: " + std::to_string(parts.size()) + " problems"});
    for (const char* part : parts) CHECK(found.has(part));
  };
  check_all(
      "compress.density=2 data.name=cifar10 train.device=cuda schedule.name=multistep",
      {"compress.density (command line) must be", "schedule.milestones", "train.device=cuda", "data.root"});
  check_all(
      "compress.density=2 data.train_size=64 model.init_from=/nowhere.safetensors compress.codec=rice "
      "train.accumulate=9 dist.backend=threads dist.master=host:1",
      {"compress.density (command line) must be", "/nowhere.safetensors", "train.accumulate", "dist.master"});
  check_all("compress.density=2 data.train_size=64 compress.codec=rice exchange.profile=/nowhere.json",
            {"compress.density (command line) must be",
             "compress.codec: rice makes no sense with compress.name: dense"});
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

TEST_CASE("a stop signal ends a run after a step, with the metrics so far, also if the parent blocked it") {
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
    CHECK(says(text_of(log), {"stopped by SIGTERM after step"}));
    const Metrics so_far = read_metrics(metrics);
    CHECK_FALSE(so_far.truncated);
    CHECK_FALSE(so_far.end);
  }
}
