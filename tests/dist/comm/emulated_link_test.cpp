// Times are checked from below only: a collective must not arrive before its modelled time; how much later it does is
// the machine's business.

#include "dist/comm/link.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

constexpr double kTimeout = 60;

double seconds_of(const std::function<void()>& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// What the ranks' threads find: the test's own thread alone may use Catch2's macros.
class Findings {
 public:
  void expect(bool holds, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (!holds) wrong_.push_back(what);
  }
  std::vector<std::string> wrong() const { return wrong_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> wrong_;
};

EmulatedLink slow_link(int ranks_per_host = 1) {
  return make_emulated_link("8mbit", "10ms", ranks_per_host);
}

TEST_CASE("an emulated link has the rate's payload and the latency, and names itself") {
  const EmulatedLink link = make_emulated_link("100mbit", "50us", 1);
  CHECK(link.link.alpha == Approx(50e-6));
  CHECK(link.link.beta == Approx(8 / (0.96 * 1e8)));
  CHECK(link.text == "emulated link 100mbit, 50us");
  CHECK(make_emulated_link("100Mbit", "50us", 1).link.beta == link.link.beta);
  CHECK(make_emulated_link("2.5gbit", "0.001", 1).link.alpha == 1e-3);
  for (const char* bad : {"", "fast", "-1mbit", "0", "1gb", "nan", "1e308"})
    CHECK(user_error([&] { make_emulated_link(bad, "0s", 1); }, {"dist.link.rate", "100mbit"}));
  for (const char* bad : {"", "50 us", "-1ms", "11s", "1h", "nan"})
    CHECK(user_error([&] { make_emulated_link("1gbit", bad, 1); }, {"dist.link.latency", "50us"}));
}

TEST_CASE(
    "every collective over an emulated link takes its modelled time after the last rank came, with the same "
    "data") {
  const EmulatedLink link = slow_link();
  const int ranks = GENERATE(2, 4);
  const auto sum_cost = [&](auto cost, double bytes) {
    return std::min(cost(link.link, ranks, bytes), all_gather_cost(link.link, ranks, bytes));
  };
  Findings found;
  const auto expect = [&](const char* what, double modelled, double taken) {
    found.expect(taken >= modelled * 0.999, fmt::format("{} took {} s, not {}", what, taken, modelled));
  };
  run_thread_ranks(
      ranks, kTimeout,
      [&](Communicator& c) {
        found.expect(c.overlaps(), "c.overlaps()");
        found.expect(c.network() == "threads, emulated link 8mbit, 10ms",
                     "c.network() == 'threads, emulated link 8mbit, 10ms'");
        const int rank = c.rank();
        c.barrier();
        std::vector<std::vector<std::byte>> all;
        // Rank 1 has the largest block.
        const std::vector<std::byte> mine(rank == 1 ? 20'000 : 10, std::byte(rank));
        expect("all_gather", all_gather_cost(link.link, ranks, 20'000),
               seconds_of([&] { c.all_gather(mine, all); }));
        for (int r = 0; r < ranks; ++r)
          found.expect(all[r].size() == (r == 1 ? 20'000u : 10u) && all[r][0] == std::byte(r), "a block");

        std::vector<float> floats(20'000, static_cast<float>(rank + 1));
        expect("ring", sum_cost(ring_all_reduce_cost, 80'000),
               seconds_of([&] { c.all_reduce(floats, SumOrder::library); }));
        found.expect(floats[7] == static_cast<float>(ranks * (ranks + 1) / 2),
                     "floats[7] == static_cast<float>(ranks * (ranks + 1) / 2)");
        expect("ordered", sum_cost(ordered_all_reduce_cost, 80'000),
               seconds_of([&] { c.all_reduce(floats, SumOrder::ranks); }));
        std::vector<BFloat16> halves(20'000);
        expect("bf16", sum_cost(ring_all_reduce_cost, 40'000),
               seconds_of([&] { c.all_reduce(halves, SumOrder::library); }));
        double one = 1;
        expect("doubles", all_gather_cost(link.link, ranks, 8),
               seconds_of([&] { c.all_reduce(std::span(&one, 1)); }));
        found.expect(one == ranks, "one == ranks");

        std::vector<std::byte> sent(10'000, std::byte(rank));
        expect("broadcast", broadcast_cost(link.link, ranks, 10'000),
               seconds_of([&] { c.broadcast(sent, 1); }));
        found.expect(sent[0] == std::byte(1), "sent[0] == std::byte(1)");
        const std::vector<std::vector<std::byte>> parts(ranks,
                                                        std::vector<std::byte>(5'000, std::byte(rank)));
        expect("all_to_all", all_gather_cost(link.link, ranks, 5'000),
               seconds_of([&] { c.all_to_all(parts, all); }));
        found.expect(all[ranks - 1].front() == std::byte(ranks - 1),
                     "all[ranks - 1].front() == std::byte(ranks - 1)");
        std::vector<std::byte> theirs;
        const int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
        expect("send_receive", link.link.alpha + 10'000 * link.link.beta,
               seconds_of([&] { c.send_receive(right, sent, left, theirs); }));
        found.expect(theirs.size() == sent.size(), "theirs.size() == sent.size()");
        // The clock starts when the last rank has come.
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        const double late = seconds_of([&] { c.barrier(); });
        if (rank == 0) expect("late rank", all_gather_cost(link.link, ranks, 0), late);
      },
      link);
  CHECK(found.wrong() == std::vector<std::string>());
}

TEST_CASE("collectives over an emulated link queue behind each other") {
  const EmulatedLink link = slow_link();
  const double one = all_gather_cost(link.link, 2, 20'000);
  Findings found;
  run_thread_ranks(
      2, kTimeout,
      [&](Communicator& c) {
        CollectiveQueue queue(c);
        const std::vector<std::byte> block(20'000);
        std::vector<std::vector<std::byte>> all;
        const auto gather = [&](Communicator& communicator) { communicator.all_gather(block, all); };
        queue.run([](Communicator& communicator) { communicator.barrier(); });
        const auto begin = Clock::now();
        const auto since = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
        queue.submit(gather);
        const auto second = queue.submit(gather);
        queue.wait(second);
        found.expect(since() >= 2 * one * 0.999, "since() >= 2 * one * 0.999");
      },
      link);
  CHECK(found.wrong() == std::vector<std::string>());
}

TEST_CASE("ranks of one host have no link between them, hosts have") {
  const EmulatedLink link = slow_link(2);
  Findings found;
  run_thread_ranks(
      4, kTimeout,
      [&](Communicator& c) {
        const auto inside = c.split(c.rank() / 2), across = c.split(c.rank() % 2);
        found.expect(inside->network() == "threads", "inside->network() == 'threads'");
        found.expect(across->network() == "threads, emulated link 8mbit, 10ms",
                     "across->network() == 'threads, emulated link 8mbit, 10ms'");
        float value = 1;
        inside->all_reduce(std::span(&value, 1), SumOrder::ranks);
        found.expect(value == 2, "value == 2");
        const double taken = seconds_of([&] { across->all_reduce(std::span(&value, 1), SumOrder::ranks); });
        found.expect(taken >= link.link.alpha, "taken >= link.link.alpha");
        found.expect(value == 4, "value == 4");
      },
      link);
  CHECK(found.wrong() == std::vector<std::string>());
}

TEST_CASE(
    "a transfer over an emulated link ends with the group, and is refused where it exceeds the deadline") {
  const std::vector<std::byte> block(1'000'000);  // 40 s at 0.2 Mbit/s
  const auto gather = [&](Communicator& c) {
    std::vector<std::vector<std::byte>> all;
    c.all_gather(block, all);
  };
  bool ended = false;
  const auto run = [&] {
    run_thread_ranks(
        2, kTimeout,
        [&](Communicator& c) {
          std::thread transfer([&] {
            try {
              gather(c);
            } catch (const CollectiveError& error) {
              if (c.rank() == 0)
                ended =
                    std::string(error.what()).find("first error: rank 1: had enough") != std::string::npos;
            }
          });
          // Long enough for the ranks to meet; where it is not, the meeting ends by the abort.
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          if (c.rank() == 1) c.abort("had enough");
          transfer.join();
        },
        make_emulated_link("200kbit", "0s", 1));
  };
  CHECK(seconds_of(run) < 30);
  CHECK(ended);
  CHECK_THROWS_WITH(run_thread_ranks(2, kTimeout, gather, make_emulated_link("1000", "0s", 1)),
                    Catch::Contains("emulated link 1000, 0s") && Catch::Contains("dist.timeout_s"));
}

}  // namespace
}  // namespace topknot
