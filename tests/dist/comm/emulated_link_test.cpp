// Times are checked from below only: a collective must not arrive before its modelled time; how much later it
// does is the machine's business.
#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/link.h"
#include "dist/sparse/sparse_collective.h"
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

const Link slow{60e-6, 1 / 0.118e9};  // 1 Gbit/s Ethernet
const Link fast{40e-6, 1 / 1.15e9};   // 10 Gbit/s
constexpr double entry = 8;           // index and value

double gtopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return collective_cost("gtopk", link, ranks, k, bytes_per_entry);
}
double oktopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return collective_cost("oktopk", link, ranks, k, bytes_per_entry);
}

}  // namespace

TEST_CASE("an emulated link changes its rate at the seconds that it says") {
  const EmulatedLink link = make_emulated_link("1gbit,50mbit@20,1gbit@40s", "1ms", 1);
  const double fast = make_emulated_link("1gbit", "1ms", 1).link.beta;
  CHECK(link.at(0).beta == fast);
  CHECK(link.at(19.9).beta == fast);
  CHECK(link.at(20).beta == Approx(20 * fast));
  CHECK(link.at(20).alpha == 1e-3);
  CHECK(link.at(1e6).beta == fast);
  for (const char* bad :
       {"1gbit,50mbit", "1gbit@3", "1gbit,50mbit@3,1gbit@2", "1gbit,50mbit@x", "1gbit,@3", "1gbit,"})
    CHECK(user_error([&] { make_emulated_link(bad, "0s", 1); }, {"dist.link.rate"}));
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
        expect("doubles", all_gather_cost(link.link, ranks, 8), seconds_of([&] {
                 sum_doubles(c, {&one, 1});
               }));
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

TEST_CASE("collective costs by hand", "[merge]") {
  const Link link{2, 0.5, 0.25};
  CHECK(all_gather_cost(link, 4, 10) == Approx(2 + 2 * 0.25 + 3 * 5));
  CHECK(ring_all_reduce_cost(link, 4, 10) == Approx(6 * (2 + 1.25)));
  CHECK(ordered_all_reduce_cost(link, 4, 10) == Approx(2 * (2.5 + 3 * 1.25)));
  CHECK(broadcast_cost(link, 4, 10) == Approx(2 * 7));
  CHECK(broadcast_cost(link, 5, 10) == Approx(3 * 7));
  CHECK(gtopk_cost(link, 4, 5, 2) == Approx(4 * 7));
  CHECK(gtopk_cost(link, 2, 5, 2) == Approx(2 * 7));
  CHECK(oktopk_cost(link, 4, 5, 2) == Approx(2 * (2.5 + 3 * 1.25)));
}

TEST_CASE("one rank spends no time on collectives", "[merge]") {
  for (const int ranks : {0, 1}) {
    CHECK(all_gather_cost(slow, ranks, 1e6) == 0);
    CHECK(ring_all_reduce_cost(slow, ranks, 1e6) == 0);
    CHECK(ordered_all_reduce_cost(slow, ranks, 1e6) == 0);
    CHECK(broadcast_cost(slow, ranks, 1e6) == 0);
    CHECK(gtopk_cost(slow, ranks, 1e6, entry) == 0);
    CHECK(oktopk_cost(slow, ranks, 1e6, entry) == 0);
    CHECK(cheapest_collective(slow, ranks, 1e6, entry) == "all_gather");
  }
}

// ResNet-50 (25.6 M parameters) and BERT-Large (336 M), density 0.001. Golden values:
// float64, rounded.
TEST_CASE("collective costs match tables computed from the papers' formulas", "[merge]") {
  const double k = 25600, dense = 4 * 25.6e6;
  struct Row {
    int ranks;
    double ring, gtopk;  // ms
  };
  for (const Row& row : {Row{4, 1302, 7.2}, Row{16, 1629, 14.4}, Row{64, 1716, 21.6}}) {
    INFO("1 Gbit/s, " << row.ranks << " ranks");
    CHECK(1e3 * ring_all_reduce_cost(slow, row.ranks, dense) == Approx(row.ring).epsilon(0.001));
    CHECK(1e3 * gtopk_cost(slow, row.ranks, k, entry) == Approx(row.gtopk).epsilon(0.01));
  }
  for (const Row& row : {Row{4, 134, 0.87}, Row{16, 168, 1.74}, Row{64, 180, 2.62}}) {
    INFO("10 Gbit/s, " << row.ranks << " ranks");
    CHECK(1e3 * ring_all_reduce_cost(fast, row.ranks, dense) == Approx(row.ring).epsilon(0.005));
    CHECK(1e3 * gtopk_cost(fast, row.ranks, k, entry) == Approx(row.gtopk).epsilon(0.01));
  }
  // The tables' all-gather has log2 P start-ups where ours has one: nothing beside a large block.
  CHECK(1e3 * all_gather_cost(slow, 4, k * entry) == Approx(5.3).epsilon(0.02));
  CHECK(1e3 * all_gather_cost(slow, 16, k * entry) == Approx(26.3).epsilon(0.02));
  CHECK(1e3 * all_gather_cost(slow, 64, k * entry) == Approx(110).epsilon(0.02));
  CHECK(1e3 * all_gather_cost(fast, 4, 336e3 * entry) == Approx(7.1).epsilon(0.02));
  CHECK(1e3 * all_gather_cost(fast, 16, 336e3 * entry) == Approx(35).epsilon(0.02));
  CHECK(1e3 * all_gather_cost(fast, 64, 336e3 * entry) == Approx(148).epsilon(0.02));
}

TEST_CASE("collectives take longer for more ranks, more bytes and slower links", "[merge]") {
  using Cost = double (*)(const Link&, int, double);
  const std::vector<Cost> costs = {
      all_gather_cost,
      ring_all_reduce_cost,
      ordered_all_reduce_cost,
      broadcast_cost,
      [](const Link& l, int p, double n) { return gtopk_cost(l, p, n, entry); },
      [](const Link& l, int p, double n) { return oktopk_cost(l, p, n, entry); }};
  for (std::size_t c = 0; c < costs.size(); ++c)
    for (int ranks = 2; ranks <= 70; ++ranks)
      for (const double bytes : {0.0, 100.0, 1e6}) {
        INFO("cost " << c << ", " << ranks << " ranks, " << bytes << " bytes");
        const double seconds = costs[c](slow, ranks, bytes);
        CHECK(seconds > 0);
        CHECK(costs[c](slow, ranks + 1, bytes) >= seconds);
        CHECK(costs[c](slow, ranks, bytes + 100) > seconds);
        CHECK(costs[c]({2 * slow.alpha, slow.beta}, ranks, bytes) > seconds);
        CHECK(costs[c]({slow.alpha, 2 * slow.beta}, ranks, bytes) >= seconds);
        CHECK(costs[c]({slow.alpha, slow.beta, 1e-6}, ranks, bytes) >= seconds);
      }
}

TEST_CASE("the ring and the ordered sum move the same bytes", "[merge]") {
  const Link wire{0, 1};
  for (const int ranks : {2, 3, 7, 16})
    CHECK(ring_all_reduce_cost(wire, ranks, 1000) == Approx(ordered_all_reduce_cost(wire, ranks, 1000)));
}

TEST_CASE("the cheapest collective changes with ranks and message", "[merge]") {
  CHECK(cheapest_collective(slow, 2, 25600, entry) == "all_gather");
  CHECK(cheapest_collective(slow, 16, 25600, entry) == "oktopk");
  CHECK(cheapest_collective(slow, 16, 10, entry) == "all_gather");  // start-ups decide
  // Where each message costs its sender, few messages win: 2 rounds of 4 for gtopk, 63 at once elsewhere.
  const Link busy{1e-6, 1e-9, 100e-6};
  CHECK(cheapest_collective(busy, 64, 10, entry) == "gtopk");
  // The choice is the least of the three.
  for (const int ranks : {2, 3, 5, 8, 32})
    for (const double k : {1.0, 1e3, 1e5})
      for (const Link& link : {slow, fast, busy}) {
        const std::string name = cheapest_collective(link, ranks, k, entry);
        const double gather = all_gather_cost(link, ranks, k * entry),
                     tree = gtopk_cost(link, ranks, k, entry), split = oktopk_cost(link, ranks, k, entry);
        const double chosen = name == "gtopk" ? tree : name == "oktopk" ? split : gather;
        CHECK(chosen <= gather);
        CHECK(chosen <= tree);
        CHECK(chosen <= split);
      }
}

TEST_CASE("a collective without a cost model is never chosen, and a plan for it is an error", "[merge]") {
  collectives().add("costless", "for this test", {});
  CHECK(cheapest_collective(slow, 16, 25600, entry) == "oktopk");
  CHECK_THROWS_AS(collective_cost("costless", slow, 4, 10, entry), UserError);
}

}  // namespace topknot
