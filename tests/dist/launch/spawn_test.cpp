// Real processes: the test program starts copies of itself, which run the hidden case below.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dist/launch/launch.h"
#include "nn/base/program.h"
#include "tests/dist/ranks.h"
#include "tests/support/child.h"
#include "tests/support/standard_error.h"

namespace topknot {
namespace {

using std::chrono::milliseconds;
using testing::code_of;

// For the words that the copies leave.
struct Folder : TempFolder {
  std::string text(int rank) const { return text_of(at(std::to_string(rank))); }
};

// Whether `done` came true within a minute.
template <class Done>
bool wait_until(const Done& done) {
  for (int i = 0; i < 1200 && !done(); ++i) std::this_thread::sleep_for(milliseconds(50));
  return done();
}

DistOptions options_of(int ranks, double timeout_s = 120) {
  DistOptions options;
  options.backend = "gloo";
  options.ranks = ranks;
  options.timeout_s = timeout_s;
  return options;
}

int run_copies(const std::string& mode, const Folder& folder, int ranks, double grace_s = 20,
               double timeout_s = 120) {
  setenv("SPAWN_TEST_MODE", mode.c_str(), 1);
  setenv("SPAWN_TEST_FOLDER", folder.str().c_str(), 1);
  std::string program = "spawn_test", name = "a copy started by a spawn test";
  char* argv[] = {program.data(), name.data(), nullptr};
  const auto options = options_of(ranks, timeout_s);
  const int code = run_spawned(plan_launch(options, [](const std::string&) { return std::nullopt; }), options,
                               argv, grace_s);
  unsetenv("SPAWN_TEST_MODE");
  return code;
}

void copy_body(Communicator& c, const std::string& mode, std::ofstream& out) {
  std::vector<float> data(100000, static_cast<float>(c.rank() + 1));
  c.all_reduce(std::span<float>(data), SumOrder::ranks);
  out << data[99999] << std::flush;
  if (mode == "killed" && c.rank() == 2) raise(SIGKILL);
  if (mode == "throws" && c.rank() == 1) throw UserError("the disk is full");
  if (mode == "slow to end" && c.rank() == 2) {
    c.abort("the disk is full");
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::_Exit(5);
  }
  if (mode == "killed unseen") {
    if (c.rank() == 0) kill(getppid(), SIGSTOP);
    c.barrier();
    if (c.rank() == 2) raise(SIGKILL);
  }
  if (mode == "exits" && c.rank() == 1) std::_Exit(7);
  if (mode == "deaf") {
    signal(SIGTERM, SIG_IGN);
    if (c.rank() == 1) std::_Exit(9);
    for (;;) pause();
  }
  if (mode == "stopped peer" && c.rank() == 1) raise(SIGSTOP);
  if (mode == "hangs at the end") {
    // What it sends must have arrived before it stops: the others are done then.
    for (int r = 0; c.rank() == 2 && r < 2; ++r)
      for (std::string text; text.find("done") == std::string::npos;) {
        std::ifstream in(std::string(std::getenv("SPAWN_TEST_FOLDER")) + "/" + std::to_string(r));
        std::getline(in, text);
        std::this_thread::sleep_for(milliseconds(10));
      }
    if (c.rank() == 2) raise(SIGSTOP);
    return;
  }
  if (mode == "signalled") {
    for (;;) pause();
  }
  if (mode == "mid-transfer") {
    // Rank 2 dies while megabytes are on their way.
    std::thread killer;
    if (c.rank() == 2)
      killer = std::thread([] {
        std::this_thread::sleep_for(milliseconds(300));
        raise(SIGKILL);
      });
    std::vector<float> large(8 << 20, 1.0f);
    for (;;) c.all_reduce(std::span<float>(large), SumOrder::library);
  }
  if (mode != "good")
    for (;;) c.barrier();
}

constexpr int kNoInterrupt = 77;

// A process that runs `body` and ends as a program would: with 128 + the signal where Interrupted, by that
// signal, comes out of it. `send`: it signals itself after half a second. Called while this process has one
// thread, as fork() wants it.
template <class Body>
pid_t start(int signal, bool send, const Body& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(100);  // no case waits without end
  install_stop_handlers();
  StopGracePeriod::alive = milliseconds(1500);
  if (send)
    std::thread([signal] {
      std::this_thread::sleep_for(milliseconds(500));
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

template <class Body>
int code_of(int signal, const Body& body) {
  return code_of(start(signal, true, body));
}

std::vector<std::string> children_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::ifstream list("/proc/" + id + "/task/" + id + "/children");
  return {std::istream_iterator<std::string>(list), {}};
}
// The letter in /proc; "" of a process that is gone.
std::string state_of(const std::string& process) {
  std::ifstream stat("/proc/" + process + "/stat");
  std::string number, name, state;
  stat >> number >> name >> state;
  return state;
}

// One rank's part on its own thread; its exception comes out where the thread is joined.
void run_two(const std::string& backend, const std::function<void(Communicator&)>& body) {
  std::exception_ptr first;
  std::mutex mutex;
  errors_of_ranks(backend, 2, {0, false}, [&](Communicator& c) {
    try {
      body(c);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      throw;
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace

// Ends the process itself: nothing of the test program's own report is wanted.
TEST_CASE("a copy started by a spawn test", "[.]") {
  const char* mode = std::getenv("SPAWN_TEST_MODE");
  const char* folder = std::getenv("SPAWN_TEST_FOLDER");
  if (mode == nullptr || folder == nullptr) return;
  signal(SIGTERM, SIG_DFL);  // Catch would report it
  if (std::string(mode).rfind("stop", 0) == 0) install_stop_handlers();
  const auto options = options_of(4);
  const auto plan = plan_launch(options, process_environment());
  if (mode == std::string("hangs at the start") && plan.rank == 2) raise(SIGSTOP);
  std::ofstream out(std::string(folder) + "/" + std::to_string(plan.rank));
  int code = 0;
  try {
    run_process_rank(plan, options, [&](Communicator& c) { copy_body(c, mode, out); });
    out << " done";
  } catch (const Interrupted& interrupted) {
    out << " " << interrupted.what();
    code = 128 + interrupted.signal;
  } catch (const std::exception& error) {
    out << " " << error.what();
    code = 3;
  }
  out.close();
  std::_Exit(code);
}

TEST_CASE("started copies meet, sum and end well, also where the launcher's parent ignored SIGCHLD") {
  void (*before)(int) = SIG_DFL;
  for (const bool ignored : {false, true}) {
    INFO("SIGCHLD ignored: " << ignored);
    if (ignored) before = signal(SIGCHLD, SIG_IGN);
    const Folder folder;
    CHECK(run_copies("good", folder, 4) == 0);
    for (int r = 0; r < 4; ++r) CHECK(folder.text(r) == "10 done");
  }
  CHECK(run_copies("killed", Folder(), 4) == 128 + SIGKILL);
  CHECK(signal(SIGCHLD, before) == SIG_IGN);
}

TEST_CASE("a killed copy ends the others with an error that names it") {
  for (const std::string mode : {"killed", "mid-transfer"}) {
    const Folder folder;
    CHECK(run_copies(mode, folder, 4) == 128 + SIGKILL);
    for (const int r : {0, 1, 3}) {
      INFO(mode << ", rank " << r);
      CHECK(says(folder.text(r), {"rank 2 died"}));
    }
  }
}

TEST_CASE("an error in one copy reaches the others unchanged") {
  const Folder folder;
  CHECK(run_copies("throws", folder, 4) == 3);
  CHECK(folder.text(1) == "10 the disk is full");
  for (const int r : {0, 2, 3}) CHECK(says(folder.text(r), {"first error: rank 1: the disk is full"}));
}

TEST_CASE("the exit code is that of the rank at fault, whichever rank the launcher sees end first") {
  {
    const Folder folder;
    CHECK(run_copies("slow to end", folder, 4) == 5);
    CHECK(folder.text(0).find("first error: rank 2: the disk is full") != std::string::npos);
  }
  // The launcher and its store are stopped until all ranks have ended.
  const Folder folder;
  const pid_t launcher = fork();
  if (launcher == 0) std::_Exit(run_copies("killed unseen", folder, 4));
  const auto ended = [&] {
    for (const int r : {0, 1, 3})
      if (folder.text(r).find("barrier #") == std::string::npos) return false;
    return true;
  };
  CHECK(wait_until(ended));
  kill(launcher, SIGCONT);
  CHECK(code_of(launcher) == 128 + SIGKILL);
}

// Where a rank is stopped, the others cannot agree on a step: they give up soon, without any deadline of
// their own.
TEST_CASE("a stop signal ends ranks that wait for a stopped one, and that one too") {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const Folder folder;
    const pid_t launcher = fork();
    if (launcher == 0) std::_Exit(run_copies("stopped peer", folder, 3, 20));
    const auto one_is_stopped = [&] {
      const auto copies = children_of(launcher);
      return std::any_of(copies.begin(), copies.end(), [](const auto& pid) { return state_of(pid) == "T"; });
    };
    CHECK(wait_until(one_is_stopped));
    const auto begin = std::chrono::steady_clock::now();
    kill(launcher, signal);
    const int code = code_of(launcher);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    CHECK(code == 128 + signal);
    CHECK(seconds < 15);  // 2 where the machine has nothing else to do; dist.timeout_s is 120
    for (const int r : {0, 2}) {
      INFO(seconds << " s, rank " << r << ": " << folder.text(r));
      CHECK(says(folder.text(r),
                 {"stopped by " + signal_name(signal) + " while waiting for rank 1", " (silent for"}));
    }
  }
}

TEST_CASE("a copy that exits without a message gives the run its exit code, and deaf ones are ended") {
  const Folder folder;
  CHECK(run_copies("exits", folder, 4) == 7);
  CHECK(says(folder.text(0), {"rank 1"}));
  CHECK(run_copies("deaf", Folder(), 4, 0.2) == 9);
}

TEST_CASE("a copy that hangs at the start, or after the others have ended well, is ended and named") {
  for (const std::string when : {"start", "end"}) {
    const Folder folder;
    int code = 0;
    std::string words;
    {
      const testing::StandardError standard_error;
      code = run_copies("hangs at the " + when, folder, 3, 1, 10);
      words = standard_error.text();
    }
    INFO(words);
    CHECK(code == (when == "start" ? 3 : 128 + SIGKILL));
    CHECK(words.find(when == "start" ? "first error: rank 2 did not come to 127.0.0.1:"
                                     : "first error: rank 2 did not end within 10 s after the others") !=
          std::string::npos);
  }
}

TEST_CASE("a signal to the launcher reaches all copies, which die with it") {
  for (const int signal : {SIGTERM, SIGUSR1, SIGKILL}) {
    const Folder folder;
    const pid_t launcher = fork();
    if (launcher == 0) std::_Exit(run_copies("signalled", folder, 3));
    const auto written = [&] {
      for (int r = 0; r < 3; ++r)
        if (folder.text(r) != "6") return false;
      return true;
    };
    CHECK(wait_until(written));
    const auto copies = children_of(launcher);
    kill(launcher, signal);
    CHECK(code_of(launcher) == 128 + signal);  // SIGKILL's too: it ends the launcher itself
    // Gone, or waiting to be collected by whoever inherited them.
    CHECK(wait_until([&] {
      return std::all_of(copies.begin(), copies.end(),
                         [](const auto& pid) { return state_of(pid).empty() || state_of(pid) == "Z"; });
    }));
  }
}

TEST_CASE("a stop signal ends a rank that connects, or waits for others or a value, without a deadline") {
  for (const int signal : kStopSignals) {
    const int port = local_port(listen_on("127.0.0.1", 0).get());
    CHECK(code_of(signal, [&] { TcpStoreClient("127.0.0.1", port, 1, 2, 0); }) == 128 + signal);
    CHECK(code_of(signal, [&] { TcpStoreClient("no-such-host.invalid", port, 1, 2, 0); }) == 128 + signal);
    CHECK(code_of(signal, [&] {
            const TcpStoreServer server("127.0.0.1", 0, 2, 0);
            TcpStoreClient("127.0.0.1", server.port(), 1, 2, 0);
          }) == 128 + signal);
  }
  CHECK(code_of(SIGTERM, [&] {
          const TcpStoreServer server("127.0.0.1", 0, 1, 0);
          TcpStoreClient client("127.0.0.1", server.port(), 0, 1, 0);
          client.get("key", Patience(0));  // which nobody sets
        }) == 128 + SIGTERM);
}

TEST_CASE("a stop signal ends a collective in which a rank is missing, and not one to which the ranks come") {
  for (const std::string backend : {"threads", "gloo"}) {
    INFO(backend);
    CHECK(code_of(SIGINT, [&] {
            run_two(backend, [](Communicator& c) {
              if (c.rank() == 0) return c.barrier();
              // Ends when the other one has given up.
              while (c.first_error().empty()) std::this_thread::sleep_for(milliseconds(20));
            });
          }) == 128 + SIGINT);
    // So that they can agree on the stop.
    CHECK(code_of(SIGTERM, [&] {
            run_two(backend, [](Communicator& c) {
              for (int i = 0; i < 6; ++i) {
                // Longer than kSilent in all, and alive.
                if (c.rank() == 1) std::this_thread::sleep_for(milliseconds(500));
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
