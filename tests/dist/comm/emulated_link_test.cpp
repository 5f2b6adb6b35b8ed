// Times are checked from below only: a collective must not arrive before its modelled time; how much later it
// does is the machine's business.
#include <fmt/format.h>

#include "dist/comm/collective_queue.h"
#include "dist/comm/link.h"
#include "dist/sparse/sparse_collective.h"
#include "tests/dist/ranks.h"

namespace topknot {
namespace {

double seconds_of(const std::function<void()>& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

EmulatedLink slow_link(int ranks_per_host = 1) {
  return make_emulated_link("8mbit", "10ms", ranks_per_host);
}

const Link slow{60e-6, 1 / 0.118e9};  // 1 Gbit/s Ethernet
const Link fast{40e-6, 1 / 1.15e9};   // 10 Gbit/s
constexpr double entry = 8;           // index and value

const auto gtopk_cost = [](const Link& link, int ranks, double k, double bytes_per_entry) {
  return collective_cost("gtopk", link, ranks, k, bytes_per_entry);
};
const auto oktopk_cost = [](const Link& link, int ranks, double k, double bytes_per_entry) {
  return collective_cost("oktopk", link, ranks, k, bytes_per_entry);
};

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
    CHECK_USER_ERROR(make_emulated_link(bad, "0s", 1), "dist.link.rate");
}

TEST_CASE("an emulated link has the rate's payload and the latency, and names itself") {
  const EmulatedLink link = make_emulated_link("100mbit", "50us", 1);
  CHECK(link.link.alpha == Approx(50e-6));
  CHECK(link.link.beta == Approx(8 / (0.96 * 1e8)));
  CHECK(link.text == "emulated link 100mbit, 50us");
  CHECK(make_emulated_link("100Mbit", "50us", 1).link.beta == link.link.beta);
  CHECK(make_emulated_link("2.5gbit", "0.001", 1).link.alpha == 1e-3);
  for (const char* bad : {"", "fast", "-1mbit", "0", "1gb", "nan", "1e308"})
    CHECK_USER_ERROR(make_emulated_link(bad, "0s", 1), "dist.link.rate", "100mbit");
  for (const char* bad : {"", "50 us", "-1ms", "11s", "1h", "nan"})
    CHECK_USER_ERROR(make_emulated_link("1gbit", bad, 1), "dist.link.latency", "50us");
}

TEST_CASE("every collective over an emulated link brings its data in the modelled time after the last rank") {
  const EmulatedLink slow = slow_link();
  const Link& link = slow.link;
  const int ranks = GENERATE(2, 4);
  const auto sum_cost = [&](auto cost, double bytes) {
    return std::min(cost(link, ranks, bytes), all_gather_cost(link, ranks, bytes));
  };
  check_ranks("link", ranks, {60, true, slow}, [&](Communicator& c, const Expect& expect) {
    const auto takes = [&](const char* what, double modelled, const std::function<void()>& work) {
      const double taken = seconds_of(work);
      expect(taken >= modelled * 0.999, fmt::format("{} took {} s, not {}", what, taken, modelled));
    };
    expect(c.overlaps(), "overlaps");
    expect(c.network() == "threads, emulated link 8mbit, 10ms", c.network());
    const int rank = c.rank();
    c.barrier();
    std::vector<std::vector<std::byte>> all;
    // Rank 1 has the largest block.
    const std::vector<std::byte> mine(rank == 1 ? 20'000 : 10, std::byte(rank));
    takes("all_gather", all_gather_cost(link, ranks, 20'000), [&] { c.all_gather(mine, all); });
    for (int r = 0; r < ranks; ++r)
      expect(all[r].size() == (r == 1 ? 20'000u : 10u) && all[r][0] == std::byte(r), "a gathered block");

    std::vector<float> floats(20'000, static_cast<float>(rank + 1));
    takes("ring", sum_cost(ring_all_reduce_cost, 80'000), [&] { c.all_reduce(floats, SumOrder::library); });
    expect(floats[7] == static_cast<float>(ranks * (ranks + 1) / 2), "the sum of floats");
    takes("ordered", sum_cost(ordered_all_reduce_cost, 80'000),
          [&] { c.all_reduce(floats, SumOrder::ranks); });
    std::vector<BFloat16> halves(20'000);
    takes("bf16", sum_cost(ring_all_reduce_cost, 40'000), [&] { c.all_reduce(halves, SumOrder::library); });
    double one = 1;
    takes("doubles", all_gather_cost(link, ranks, 8), [&] { sum_doubles(c, {&one, 1}); });
    expect(one == ranks, "the sum of doubles");

    std::vector<std::byte> sent(10'000, std::byte(rank)), theirs;
    takes("broadcast", broadcast_cost(link, ranks, 10'000), [&] { c.broadcast(sent, 1); });
    expect(sent[0] == std::byte(1), "what was broadcast");
    const std::vector<std::vector<std::byte>> parts(ranks, std::vector<std::byte>(5'000, std::byte(rank)));
    takes("all_to_all", all_gather_cost(link, ranks, 5'000), [&] { c.all_to_all(parts, all); });
    expect(all[ranks - 1].front() == std::byte(ranks - 1), "the block of all_to_all");
    const int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    takes("send_receive", link.alpha + 10'000 * link.beta,
          [&] { c.send_receive(right, sent, left, theirs); });
    expect(theirs.size() == sent.size(), "what was received");
    // The clock starts when the last rank has come.
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    takes("late rank", rank == 0 ? all_gather_cost(link, ranks, 0) : 0, [&] { c.barrier(); });
  });
}

TEST_CASE("collectives over an emulated link queue behind each other") {
  const EmulatedLink link = slow_link();
  check_ranks("link", 2, {60, true, link}, [&](Communicator& c, const Expect& expect) {
    CollectiveQueue queue(c);
    std::vector<std::vector<std::byte>> all;
    const auto gather = [&](Communicator& c) { c.all_gather(std::vector<std::byte>(20'000), all); };
    queue.run([](Communicator& c) { c.barrier(); });
    const double taken = seconds_of([&] {
      queue.submit(gather);
      queue.wait(queue.submit(gather));
    });
    expect(taken >= 2 * all_gather_cost(link.link, 2, 20'000) * 0.999, fmt::format("{} s", taken));
  });
}

TEST_CASE("ranks of one host have no link between them, hosts have") {
  const EmulatedLink link = slow_link(2);
  check_ranks("link", 4, {60, true, link}, [&](Communicator& c, const Expect& expect) {
    const auto inside = c.split(c.rank() / 2), across = c.split(c.rank() % 2);
    expect(inside->network() == "threads", inside->network());
    expect(across->network() == "threads, emulated link 8mbit, 10ms", across->network());
    float value = 1;
    inside->all_reduce(std::span(&value, 1), SumOrder::ranks);
    expect(value == 2, "the sum of a host");
    const double taken = seconds_of([&] { across->all_reduce(std::span(&value, 1), SumOrder::ranks); });
    expect(taken >= link.link.alpha, fmt::format("{} s between hosts", taken));
    expect(value == 4, "the sum of all");
  });
}

TEST_CASE("a transfer over an emulated link ends with the group, and is refused beyond the deadline") {
  const auto gather = [](Communicator& c) {
    std::vector<std::vector<std::byte>> all;
    c.all_gather(std::vector<std::byte>(1'000'000), all);  // 40 s at 0.2 Mbit/s
  };
  const auto run = [&] {
    check_ranks("link", 2, {60, true, make_emulated_link("200kbit", "0s", 1)},
                [&](Communicator& c, const Expect& expect) {
                  std::string error;
                  std::thread transfer([&] { error = error_text<CollectiveError>([&] { gather(c); }); });
                  // Long enough for the ranks to meet; where it is not, the meeting ends by the abort.
                  std::this_thread::sleep_for(std::chrono::milliseconds(300));
                  if (c.rank() == 1) c.abort("had enough");
                  transfer.join();
                  if (c.rank() == 0) expect(contains(error, "first error: rank 1: had enough"), error);
                });
  };
  CHECK(seconds_of(run) < 30);
  CHECK_THROWS_WITH(run_thread_ranks(2, 60, gather, make_emulated_link("1000", "0s", 1)),
                    Catch::Contains("emulated link 1000, 0s") && Catch::Contains("dist.timeout_s"));
}

TEST_CASE("collective costs by hand") {
  const Link link{2, 0.5, 0.25};
  CHECK(all_gather_cost(link, 4, 10) == Approx(2 + 2 * 0.25 + 3 * 5));
  CHECK(ring_all_reduce_cost(link, 4, 10) == Approx(6 * (2 + 1.25)));
  CHECK(ordered_all_reduce_cost(link, 4, 10) == Approx(2 * (2.5 + 3 * 1.25)));
  CHECK(broadcast_cost(link, 4, 10) == Approx(2 * 7));
  CHECK(broadcast_cost(link, 5, 10) == Approx(3 * 7));
  CHECK(all_gather_cost(link, 64, 10) == Approx(2 + 62 * 0.25 + 63 * 5));
  CHECK(ring_all_reduce_cost(link, 16, 32) == Approx(30 * (2 + 1)));
  CHECK(ordered_all_reduce_cost(link, 16, 32) == Approx(2 * (2 + 14 * 0.25 + 15 * 1)));
  CHECK(gtopk_cost(link, 16, 5, 2) == Approx(8 * 7));
  CHECK(gtopk_cost(link, 4, 5, 2) == Approx(4 * 7));
  CHECK(gtopk_cost(link, 2, 5, 2) == Approx(2 * 7));
  CHECK(oktopk_cost(link, 4, 5, 2) == Approx(2 * (2.5 + 3 * 1.25)));
}

TEST_CASE("one rank spends no time on collectives") {
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

TEST_CASE("collectives take longer for more ranks, more bytes and slower links") {
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

TEST_CASE("the cheapest collective changes with ranks and message") {
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

TEST_CASE("a collective without a cost model is never chosen, and a plan for it is an error") {
  collectives().add("costless", "for this test", {});
  CHECK(cheapest_collective(slow, 16, 25600, entry) == "oktopk");
  CHECK_THROWS_AS(collective_cost("costless", slow, 4, 10, entry), UserError);
}

}  // namespace topknot
