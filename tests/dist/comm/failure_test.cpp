// What happens when a rank does not come, gives up, leaves, or makes another call than the others. Every case
// must end by itself: a hang is a failure that ctest's timeout shows.
#include <fmt/format.h>
#include <csignal>

#include "tests/dist/ranks.h"
#include "tests/support/child.h"
#include "tests/support/free_port.h"

namespace topknot {
namespace {

using std::chrono::milliseconds;
using testing::code_of;
using testing::start_process;

// Waits far longer than the deadlines, but not for ever.
struct Gate {
  std::atomic<int> finished = 0;
  void finish() { ++finished; }
  bool wait_for(int count) {
    for (int i = 0; i < 12000 && finished < count; ++i) std::this_thread::sleep_for(milliseconds(5));
    return finished >= count;
  }
};

constexpr double kTimeout = 3;

// A process that runs `body`, which says when to suspend it by a byte and goes on when it reads one. Its exit
// code.
template <class Body>
int code_of_suspended(const Body& body) {
  int ready[2], go_on[2];
  REQUIRE(pipe(ready) == 0);
  REQUIRE(pipe(go_on) == 0);
  const pid_t child = start_process([&] {
    body([&] {
      char byte = 'x';
      if (write(ready[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1) std::_Exit(70);
    });
  });
  char byte;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  std::this_thread::sleep_for(milliseconds(300));  // for the others to wait
  kill(child, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::duration<double>(kTimeout + 1));
  kill(child, SIGCONT);
  std::this_thread::sleep_for(milliseconds(300));  // for the others to look at the clock
  CHECK(write(go_on[1], "x", 1) == 1);
  const int code = code_of(child);
  for (const int fd : {ready[0], ready[1], go_on[0], go_on[1]}) close(fd);
  return code;
}

// The errors of the ranks, which run `body`; rank `silent` is a process of its own that stops in it.
std::vector<std::string> errors_beside_silent(int size, int silent,
                                              const std::function<void(JoinOptions)>& body) {
  const int port = free_port();
  const auto run = [&](int rank) { body(join_options(rank, size, port)); };
  const pid_t child = start_process([&] { run(silent); });
  const auto errors = testing::errors_of_threads(size, [&](int rank) {
    if (rank != silent) run(rank);
  });
  kill(child, SIGKILL);
  code_of(child);
  return errors;
}

}  // namespace

TEST_CASE("a rank that never comes ends the others' call at the deadline") {
  for (const auto& backend : kBackends)
    for (const std::size_t count : {10u, 50000u}) {
      Gate gate;
      const auto errors = errors_of_ranks(backend, 3, {1.0, false}, [&](Communicator& c) {
        c.barrier();
        if (c.rank() == 2) {
          if (!gate.wait_for(2)) throw std::runtime_error("the others hang");
          return;
        }
        std::vector<float> data(count, 1.0f);
        try {
          c.all_reduce(std::span<float>(data), SumOrder::ranks);
        } catch (const CollectiveError&) {
          gate.finish();
          throw;
        }
      });
      INFO(backend << ": " << errors[0] << " | " << errors[1] << " | " << errors[2]);
      for (int r = 0; r < 2; ++r) {
        CHECK(says(errors[r], {"rank " + std::to_string(r) + ": all_reduce #2", "rank 2 did not come",
                               "dist.timeout_s (1 s)"}));
      }
      CHECK(errors[2].empty());
    }
}

TEST_CASE("the first of several reasons stays") {
  for (const auto& backend : kBackends) {
    Gate entered, gate;
    const auto errors = errors_of_ranks(backend, 3, {600, false}, [&](Communicator& c) {
      c.barrier();
      entered.finish();
      entered.wait_for(3);  // all are connected
      if (c.rank() == 0) {
        c.abort("the first");
      } else if (c.rank() == 1) {
        try {
          c.barrier();
        } catch (const CollectiveError&) {
          c.abort("the second");
          gate.finish();
        }
      } else {
        gate.wait_for(1);
        c.barrier();
      }
    });
    INFO(backend << ": " << errors[2]);
    CHECK(contains(errors[2], "rank 0: the first"));
    CHECK_FALSE(contains(errors[2], "second"));
  }
}

TEST_CASE("abort from another thread of a rank ends its own call") {
  for (const auto& backend : kBackends) {
    Gate gate;
    const auto errors = errors_of_ranks(backend, 2, {600, false}, [&](Communicator& c) {
      c.barrier();
      if (c.rank() == 1) {
        gate.wait_for(1);  // never calls, is only told
        c.barrier();
        return;
      }
      std::thread other([&] {
        std::this_thread::sleep_for(milliseconds(50));
        c.abort("stopped from outside");
      });
      std::vector<std::vector<std::byte>> all;
      const std::string text =
          error_text<CollectiveError>([&] { c.all_gather(std::vector<std::byte>(100000), all); });
      other.join();
      gate.finish();
      throw std::runtime_error(text);
    });
    for (const auto& error : errors) CHECK(says(error, {"rank 0: stopped from outside"}));
  }
}

TEST_CASE("after a failure every call throws") {
  for (const auto& backend : kBackends) {
    Gate entered;
    std::vector<int> thrown(2);
    errors_of_ranks(backend, 2, {600, false}, [&](Communicator& c) {
      c.barrier();
      entered.finish();
      entered.wait_for(2);  // all are connected
      if (c.rank() == 0) c.abort("enough");
      for (int i = 0; i < 3; ++i) {
        try {
          c.barrier();
        } catch (const CollectiveError& error) {
          thrown[c.rank()] += contains(error.what(), "enough");
        }
      }
    });
    CHECK(thrown == std::vector<int>{3, 3});
  }
}

TEST_CASE("a rank that leaves early ends the others' calls") {
  for (const auto& backend : kBackends) {
    const auto errors = errors_of_ranks(backend, 3, {20, false}, [&](Communicator& c) {
      c.barrier();
      if (c.rank() != 1) c.barrier();
    });
    for (const int r : {0, 2}) CHECK(says(errors[r], {"barrier #2"}));
    CHECK(errors[1].empty());
  }
}

TEST_CASE("a rank that waits alone for one that leaves gets an error at once") {
  const auto errors = errors_of_ranks("threads", 2, {5, false}, [&](Communicator& c) {
    c.barrier();
    if (c.rank() == 0) return c.barrier();
    std::this_thread::sleep_for(milliseconds(200));
  });
  CHECK(says(errors[0], {"rank 1 ended while the others went on"}));
}

TEST_CASE("ranks that make different calls, or sum different lengths, get an error that names them") {
  using Body = std::function<void(Communicator&)>;
  const auto sum = [](std::size_t count) -> Body {
    return [=](Communicator& c) {
      std::vector<float> data(count + c.rank());
      c.all_reduce(std::span<float>(data), SumOrder::library);
    };
  };
  const Body broadcast = [](Communicator& c) {
    std::vector<float> data(20000);
    if (c.rank() == 0) return c.all_reduce(std::span<float>(data), SumOrder::ranks);
    c.broadcast(std::as_writable_bytes(std::span(data)), 1);
  };
  const Body all_to_all = [](Communicator& c) {
    std::vector<std::vector<std::byte>> theirs, mine(2);
    c.rank() == 0 ? c.all_to_all(mine, theirs) : c.barrier();
  };
  struct Row {
    Body body;
    std::string first, second;
  };
  for (const auto& backend : kBackends)
    for (const auto& [body, first, second] :
         {Row{broadcast, "all_reduce #1 of 80000 bytes", "broadcast #1 of 80000 bytes"},
          Row{all_to_all, "all_to_all #1", "barrier #1"}, Row{sum(100), "400 bytes", "404 bytes"},
          Row{sum(20000), "80000 bytes", "80004 bytes"}})
      for (const auto& error : errors_of_ranks(backend, 2, body))
        CHECK(says(error, {"do not make the same calls", first, second}));
}

// As with the network of rank 0's host cut: rank 1 gives up first, and its reason, which rank 0 would pass
// on, does not come.
TEST_CASE("gloo: where rank 0 serves the rendezvous and is silent, no rank names one that gave up on it") {
  const auto errors = errors_beside_silent(3, 0, [](JoinOptions options) {
    options.serve_store = options.rank == 0;
    if (options.rank > 0) options.timeout_s = options.rank == 1 ? 3 : 60;
    const auto group = make_gloo_communicator(options);
    group->barrier();
    if (options.rank == 0) raise(SIGSTOP);
    std::vector<std::byte> theirs;
    group->send_receive(-1, {}, options.rank - 1, theirs);
  });
  for (const int r : {1, 2}) CHECK(says(errors[r], {"rank 0, which serves the rendezvous, does not answer"}));
  CHECK(contains(errors[2], "rank 2: send_receive"));
  CHECK_FALSE(contains(errors[2], "rank 1"));
}

TEST_CASE("gloo: a rank 0 that serves the rendezvous and is silent while ranks connect is named") {
  const auto errors = errors_beside_silent(3, 0, [](JoinOptions options) {
    if (options.rank == 0) {
      const TcpStoreServer server("127.0.0.1", options.port, 3, 60);
      TcpStoreClient store("127.0.0.1", options.port, 0, 3, 60);
      for (const int r : {1, 2}) store.get(fmt::format("address of {} for 0", r), Patience(60), r);
      raise(SIGSTOP);  // all ranks have come, and none has this one's address
    }
    options.timeout_s = 3;
    make_gloo_communicator(options);
  });
  for (const int r : {1, 2})
    CHECK(says(errors[r],
               {"could not connect to all ranks", "rank 0, which serves the rendezvous, does not answer"}));
}

TEST_CASE("gloo: a silent rank is named by all ranks of its run's splits, and no rank that waits for it") {
  for (const int silent : {0, 2}) {  // rank 0 serves the rendezvous
    const auto errors = errors_beside_silent(4, silent, [&](JoinOptions options) {
      options.timeout_s = 4;
      options.serve_store = options.rank == 0;
      const auto all = make_gloo_communicator(options);
      const auto inside = all->split(options.rank / 2), across = all->split(options.rank % 2);
      all->barrier();
      if (options.rank == silent) raise(SIGSTOP);
      across->barrier();
      inside->barrier();
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == silent) continue;
      INFO("silent: " << silent << "; " << errors[rank]);
      CHECK(says(errors[rank], {fmt::format("rank {}: ", rank), fmt::format("rank {}", silent)}));
      for (int other = 0; other < 4; ++other)
        if (other != silent) CHECK_FALSE(contains(errors[rank], fmt::format("rank {} did not come", other)));
    }
  }
}

TEST_CASE("a rank that gives up because of another's error publishes that error alone") {
  for (const auto& backend : kBackends) {
    const auto errors = errors_of_ranks(backend, 2, {5.0, false}, [](Communicator& c) {
      if (c.rank() == 1) throw CollectiveError("rank 1: barrier was ended\nfirst error: rank 7: bad luck");
      c.barrier();
    });
    CHECK(says(errors[0], {"first error: rank 7: bad luck"}));
    CHECK_FALSE(contains(errors[0], "was ended\nfirst error: rank 1"));
    CHECK_FALSE(contains(errors[0], "rank 1: barrier"));
  }
}

TEST_CASE("a split's errors number the ranks as the run does") {
  for (const auto& backend : kBackends) {
    INFO(backend);
    const auto errors = errors_of_ranks(backend, 4, {1.0, false}, [](Communicator& c) {
      const auto part = c.split(c.rank() % 2);
      if (c.rank() != 1) return std::this_thread::sleep_for(milliseconds(2500));
      part->barrier();
    });
    CHECK(says(errors[1], {"rank 1: barrier", "rank 3 did not come"}));
    CHECK_FALSE(contains(errors[1], "rank 0"));
  }
}

TEST_CASE("run_thread_ranks throws the error that ended the others, though theirs come out earlier") {
  Gate gate;
  const auto body = [&](Communicator& c) {
    if (c.rank() == 2) {
      // It tells the reason first and takes its time to end, as a rank that closes its files.
      c.abort("the disk is full");
      CHECK(gate.wait_for(2));
      std::this_thread::sleep_for(milliseconds(200));
      throw UserError("the disk is full");
    }
    try {
      c.barrier();
    } catch (...) {
      gate.finish();
      throw;
    }
  };
  CHECK_THROWS_AS(run_thread_ranks(3, 60, body), UserError);
}

TEST_CASE("ranks that were suspended together for longer than dist.timeout_s go on") {
  for (const std::string backend : {"threads", "link", "gloo"}) {
    INFO(backend);
    CHECK(code_of_suspended([&](const auto& suspended) {
            run_ranks(backend, 2, {kTimeout, false}, [&](Communicator& c) {
              c.barrier();
              if (c.rank() == 1) suspended();
              float one = 1;
              c.all_reduce(std::span<float>(&one, 1), SumOrder::ranks);
              if (one != 2) throw std::runtime_error("another sum");
            });
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
