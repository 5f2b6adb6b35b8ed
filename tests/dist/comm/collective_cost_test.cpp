#include "dist/comm/link.h"

#include <vector>

#include "dist/sparse/sparse_collective.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

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
