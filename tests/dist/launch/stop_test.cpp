// Stop signals where a rank waits for others. Each case runs in a process of its own, which signals itself.

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "nn/base/program.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

constexpr int kNoInterrupt = 77;

// A process that runs `body` and ends as a program would: with 128 + the signal where Interrupted, by that signal, comes out
// of it. `send`: it signals itself after half a second. Called while this process has one thread, as fork() wants it.
template <class Body>
pid_t start(int signal, bool send, const Body& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(100);  // no case waits without end
  install_stop_handlers();
  StopGracePeriod::alive = std::chrono::milliseconds(1500);
  if (send)
    std::thread([signal] {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      kill(getpid(), signal);
    }).detach();
  int code = kNoInterrupt;
  try {
    body();
  } catch (const Interrupted& interrupted) {
    code = std::string(interrupted.what()).find("stopped by " + signal_name(signal)) == std::string::npos
               ? 76
               : 128 + interrupted.signal;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 75;
  }
  std::_Exit(code);
}

int code_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

template <class Body>
int code_of(int signal, const Body& body) {
  return code_of(start(signal, true, body));
}

// One rank's part on its own thread; its exception comes out where the thread is joined.
void run_two(const std::string& backend, const std::function<void(Communicator&)>& body) {
  std::exception_ptr first;
  std::mutex mutex;
  errors_of_ranks(backend, 2,
                  [&](Communicator& c) {
                    try {
                      body(c);
                    } catch (...) {
                      const std::lock_guard lock(mutex);
                      if (!first) first = std::current_exception();
                      throw;
                    }
                  },
                  {0, false});
  if (first) std::rethrow_exception(first);
}

}  // namespace

TEST_CASE("a stop signal ends a rank that connects, or waits for the others to come, without a deadline") {
  for (const int signal : kStopSignals) {
    const int port = local_port(listen_on("127.0.0.1", 0).get());
    CHECK(code_of(signal, [&] { TcpStoreClient("127.0.0.1", port, 1, 2, 0); }) == 128 + signal);
    CHECK(code_of(signal, [&] { TcpStoreClient("no-such-host.invalid", port, 1, 2, 0); }) == 128 + signal);
    CHECK(code_of(signal, [&] {
            const TcpStoreServer server("127.0.0.1", 0, 2, 0);
            TcpStoreClient("127.0.0.1", server.port(), 1, 2, 0);
          }) == 128 + signal);
  }
}

TEST_CASE("a stop signal ends a wait for a value that nobody sets") {
  CHECK(code_of(SIGTERM, [&] {
          const TcpStoreServer server("127.0.0.1", 0, 1, 0);
          TcpStoreClient client("127.0.0.1", server.port(), 0, 1, 0);
          client.get("key", Patience(0));
        }) == 128 + SIGTERM);
}

TEST_CASE("a stop signal ends a collective in which a rank is missing") {
  for (const std::string backend : {"threads", "gloo"}) {
    INFO(backend);
    CHECK(code_of(SIGINT, [&] {
            run_two(backend, [](Communicator& c) {
              if (c.rank() == 1) {
                // Ends when the other one has given up.
                while (c.first_error().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
                return;
              }
              c.barrier();
            });
          }) == 128 + SIGINT);
  }
}

TEST_CASE(
    "a collective goes on after a stop signal where the ranks come, so that they can agree on the stop") {
  for (const std::string backend : {"threads", "gloo"}) {
    INFO(backend);
    CHECK(code_of(SIGTERM, [&] {
            run_two(backend, [](Communicator& c) {
              for (int i = 0; i < 6; ++i) {
                // Longer than kSilent in all, and alive.
                if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
                c.barrier();
              }
            });
          }) == kNoInterrupt);
  }
}

TEST_CASE("a stop signal ends the wait for a transfer over an emulated link") {
  CHECK(code_of(SIGTERM, [&] {
          // Some 1000 s, longer than the alarm allows.
          run_thread_ranks(
              2, 0,
              [](Communicator& c) {
                const std::vector<std::byte> block(120'000);
                std::vector<std::vector<std::byte>> all;
                c.all_gather(block, all);
              },
              make_emulated_link("1000", "0s", 1));
        }) == kNoInterrupt);
}

TEST_CASE("a rank that was not signalled ends with the signal of the one that gave up") {
  const int port = local_port(listen_on("127.0.0.1", 0).get());
  const pid_t other = start(SIGUSR1, false, [&] {
    const TcpStoreServer server("127.0.0.1", port, 3, 60);
    TcpStoreClient("127.0.0.1", port, 0, 3, 60);
  });
  CHECK(code_of(SIGUSR1, [&] { TcpStoreClient("127.0.0.1", port, 1, 3, 60); }) == 128 + SIGUSR1);
  CHECK(code_of(other) == 128 + SIGUSR1);
}

}  // namespace topknot
