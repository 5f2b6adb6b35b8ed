#include "dist/comm/peer_report.h"

#include "tests/support/catch.h"

namespace topknot {

TEST_CASE("the rank at fault has not started the call, or is silent where all have") {
  // By rank: calls started, ms of silence. Rank 1 asks, in call 812, waiting for rank 2.
  const auto fault = [](const std::vector<PeerState>& peers) {
    return report_peers(peers, 1, 812, 2).awaited;
  };
  CHECK(fault({{811, 9800}, {812, 0}, {812, 200}, {812, 100}}) == 0);    // hangs
  CHECK(fault({{812, 9800}, {812, 0}, {812, 200}, {812, 100}}) == 0);    // hangs inside the call
  CHECK(fault({{811, 100}, {812, 0}, {812, 200}, {812, 100}}) == 0);     // computes, or its thread hangs
  CHECK(fault({{811, 100}, {812, 0}, {811, 9000}, {810, 0}}) == 2);      // silent before heard
  CHECK(fault({{812, 9000}, {812, 0}, {812, 200}, {811, 100}}) == 3);    // behind before silent
  CHECK(fault({{811, 100}, {812, 0}, {809, 200}, {810, 100}}) == 2);     // the lowest number
  CHECK(fault({{812, 100}, {812, 0}, {812, 200}, {813, 100}}) == 2);     // no one: as the connection says
  CHECK(fault({{812, 100}, {811, 9000}, {812, 200}, {812, 100}}) == 2);  // never the rank itself
}

TEST_CASE("the report lists the calls of all ranks, those that are the same together") {
  CHECK(report_peers({{811, 9800}, {800, 0}, {812, 200}, {812, 100}}, 1, 812, 2).calls ==
        "rank 0 #811 (silent for 9.8 s), ranks 1 to 3 #812");
  CHECK(report_peers({{5, 0}, {5, 0}}, 0, 5, 1).calls == "ranks 0 to 1 #5");
  std::vector<PeerState> many;
  for (std::uint64_t r = 0; r < 1000; ++r) many.push_back({r, 0});
  CHECK(report_peers(many, 0, 0, 1).calls.size() < 200);
}

TEST_CASE("peers are alive where each was heard of lately") {
  CHECK(peers_alive({{1, 0}, {1, 1000}}, 0));
  CHECK(peers_alive({{1, 90000}, {1, 1000}}, 0));  // its own beats do not count
  CHECK_FALSE(peers_alive({{1, 0}, {1, 1500}}, 0));
}

}  // namespace topknot
