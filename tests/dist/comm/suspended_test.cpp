// A job that is suspended as a whole for longer than its timeout goes on.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <thread>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

constexpr double kTimeout = 3;

// A process that runs `body`, which says when to suspend it by a byte and goes on when it reads one. Its exit code.
template <class Body>
int code_of_suspended(const Body& body) {
  int ready[2], go_on[2];
  REQUIRE(pipe(ready) == 0);
  REQUIRE(pipe(go_on) == 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(100);
    int code = 0;
    try {
      body([&] {
        char byte = 'x';
        if (write(ready[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1) std::_Exit(70);
      });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      code = 1;
    }
    std::_Exit(code);
  }
  char byte;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for the others to wait
  kill(child, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::duration<double>(kTimeout + 1));
  kill(child, SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for the others to look at the clock
  CHECK(write(go_on[1], "x", 1) == 1);
  int status = 0;
  waitpid(child, &status, 0);
  for (const int fd : {ready[0], ready[1], go_on[0], go_on[1]}) close(fd);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("ranks that were suspended together for longer than dist.timeout_s go on") {
  for (const std::string backend : {"threads", "link", "gloo"}) {
    INFO(backend);
    CHECK(code_of_suspended([&](const auto& suspended) {
            run_ranks(backend, 2,
                      [&](Communicator& c) {
                        c.barrier();
                        if (c.rank() == 1) suspended();
                        float one = 1;
                        c.all_reduce(std::span<float>(&one, 1), SumOrder::ranks);
                        if (one != 2) throw std::runtime_error("another sum");
                      },
                      {kTimeout, false});
          }) == 0);
  }
}

TEST_CASE("ranks that are suspended while they meet go on") {
  CHECK(code_of_suspended([&](const auto& suspended) {
          TcpStoreServer server("127.0.0.1", 0, 2, kTimeout);
          std::thread first([&] { TcpStoreClient("127.0.0.1", server.port(), 0, 2, kTimeout); });
          suspended();
          TcpStoreClient("127.0.0.1", server.port(), 1, 2, kTimeout);
          first.join();
        }) == 0);
}

}  // namespace topknot
