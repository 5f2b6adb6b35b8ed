// Programs that gpu-check starts: how they end, and that nothing holds it up.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "nn/base/program.h"
#include "tests/support/catch.h"
#include "tests/tools/gpu_check/gpu_check_fakes.h"
#include "tools/gpu_check/process.h"

using namespace topknot;
using namespace topknot::gpu_check;
using testing::Fakes;
using testing::gone;

namespace {

Outcome shell(const std::string& script, double seconds = 10) {
  return run({{"sh", "-c", script}}, seconds);
}

}  // namespace

TEST_CASE("a program's exit status and both of its streams come back") {
  const Outcome good = shell("echo one; echo two >&2");
  CHECK(good.ok());
  CHECK(good.code == 0);
  CHECK(good.output == "one\ntwo\n");
  const Outcome bad = shell("echo why it failed; exit 7");
  CHECK_FALSE(bad.ok());
  CHECK(bad.code == 7);
  CHECK(bad.reason("sh") == "why it failed");
  CHECK(shell("exit 7").reason("sh") == "exit status 7");
}

TEST_CASE("a program that a signal ended counts as 128 more than it") {
  const Outcome outcome = shell("echo before; kill -SEGV $$");
  CHECK(outcome.code == 128 + SIGSEGV);
  CHECK(outcome.reason("sh") == "ended by signal 11: before");
}

TEST_CASE("a program that is not there, is no program, or is a folder is not called passed") {
  const Fakes fakes;
  for (const std::string& name :
       {std::string("no-such-program-at-all"), fakes.path("nothing"), fakes.folder()}) {
    const Outcome outcome = run({{name}}, 5);
    CHECK_FALSE(outcome.found);
    CHECK_FALSE(outcome.ok());
    CHECK(outcome.reason(name) == name + " is not there");
  }
  fakes.write_file("text", "echo no\n");
  CHECK_FALSE(run({{fakes.path("text")}}, 5).found);
  CHECK(is_program("sh"));
  CHECK(is_program("/bin/sh"));
}

TEST_CASE("a program whose interpreter is missing says so instead of passing") {
  const Fakes fakes;
  fakes.program("broken", "#!/no/such/interpreter\n", "");
  const Outcome outcome = run({{fakes.path("broken")}}, 5);
  CHECK(outcome.found);
  CHECK_FALSE(outcome.ok());
  CHECK(outcome.reason("broken") == fakes.path("broken") + " cannot be started: No such file or directory");
}

TEST_CASE("what runs too long is killed at its deadline, with its children") {
  const Fakes fakes;
  const Outcome outcome =
      shell("sleep 60 & echo $! >" + fakes.path("child") + "; echo waiting; sleep 60", 0.3);
  CHECK(outcome.timed_out);
  CHECK_FALSE(outcome.ok());
  CHECK(outcome.seconds >= 0.3);
  CHECK(outcome.seconds < 10);
  CHECK(outcome.reason("sh") == "not done in its time; its last line: waiting");
  CHECK(gone(fakes.number_in("child")));
}

TEST_CASE("a child that a program leaves behind is killed when the program ends") {
  const Fakes fakes;
  const Outcome outcome = shell("sleep 60 & echo $! >" + fakes.path("child") + "; echo done", 30);
  CHECK(outcome.ok());
  CHECK(outcome.seconds < 20);
  CHECK(gone(fakes.number_in("child")));
}

TEST_CASE("a child in a session of its own that holds the pipe, or floods it, holds nobody up") {
  const Fakes fakes;
  for (const std::string work : {"sleep 4", "timeout 4 yes"}) {
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome = shell("setsid " + work + " & sleep 0.3; echo done", 30);
    CHECK(outcome.ok());
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(3));
  }
}

TEST_CASE("of much output the end is kept") {
  const Outcome outcome = shell("i=0; while [ $i -lt 12000 ]; do echo line number $i; i=$((i+1)); done");
  CHECK(outcome.ok());
  CHECK(outcome.output.size() <= 65536);
  CHECK(outcome.output.size() > 60000);
  CHECK(outcome.last_line() == "line number 11999");
}

TEST_CASE("the last line leaves out rules, empty lines and what a progress bar wrote over") {
  Outcome outcome;
  outcome.output = "first\n10 %\r20 %\r30 % done\r\n=======\n  \n";
  CHECK(outcome.last_line() == "30 % done");
  outcome.output.clear();
  CHECK(outcome.last_line().empty());
}

TEST_CASE("programs run side by side, each with its own environment and without a launcher's") {
  setenv("OMPI_COMM_WORLD_RANK", "5", 1);
  setenv("RANK", "6", 1);
  std::vector<Command> commands;
  for (const std::string rank : {"0", "1"})
    commands.push_back({{"sh", "-c", "echo $RANK-${WORLD_SIZE}-${OMPI_COMM_WORLD_RANK}; sleep 1"},
                        {{"RANK", rank}, {"WORLD_SIZE", "2"}}});
  commands.push_back({{"sh", "-c", "echo ${RANK-none}"}});
  const auto outcomes = run_all(commands, 20);
  unsetenv("OMPI_COMM_WORLD_RANK");
  unsetenv("RANK");
  CHECK(outcomes[0].output == "0-2-\n");
  CHECK(outcomes[1].output == "1-2-\n");
  CHECK(outcomes[2].output == "none\n");
  CHECK(outcomes[2].seconds < outcomes[0].seconds);
  CHECK(outcomes[0].ok());
}

TEST_CASE("a program that asks for input gets its end") {
  CHECK(run({{"cat"}}, 10).ok());
}

TEST_CASE("a signal that asks for an end kills what runs, with its children") {
  const Fakes fakes;
  install_stop_handlers();
  std::thread sender([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(getpid(), SIGINT);
  });
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(shell("sleep 60 & echo $! >" + fakes.path("child") + "; sleep 60", 60), Interrupted);
  sender.join();
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  CHECK(gone(fakes.number_in("child")));
  install_stop_handlers();  // forgets the signal
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}
