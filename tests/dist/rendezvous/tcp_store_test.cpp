#include "dist/rendezvous/tcp_store.h"

#include "dist/comm/communicator.h"
#include "tests/support/catch.h"
#include "tests/support/text.h"

namespace topknot {
namespace {

template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

int free_port() {
  return local_port(listen_on("127.0.0.1", 0).get());
}

JoinOptions options_of(int rank, int size, int port, double timeout_s) {
  JoinOptions options;
  options.rank = rank;
  options.size = size;
  options.port = port;
  options.timeout_s = timeout_s;
  options.serve_store = rank == 0;
  return options;
}

}  // namespace

TEST_CASE("values that one rank sets come to a rank that waits for them") {
  TcpStoreServer server("127.0.0.1", 0, 2, 20);
  std::string got;
  std::thread other([&] {
    TcpStoreClient client("127.0.0.1", server.port(), 1, 2, 20);
    got = client.get("key", Patience(20));
    client.set("answer", got + "!");
  });
  TcpStoreClient client("127.0.0.1", server.port(), 0, 2, 20);
  const std::string value("a\0b", 3);
  client.set("key", value);
  CHECK(client.get("answer", Patience(20)) == value + "!");
  CHECK_THROWS_AS(client.get("nobody sets this", Patience(0.05)), CollectiveError);
  CHECK(error_of([&] {
          client.get("address", Patience(0.05), 1);
        }).rfind("rank 1 did not publish 'address' at ", 0) == 0);
  CHECK(client.address() == "127.0.0.1");
  other.join();
  CHECK(server.first_reason().empty());
}

TEST_CASE("ranks meet and exchange over IPv6's loopback address, and rank 0 listens nowhere else") {
  Fd probe;
  try {
    probe = listen_on("::1", 0);
  } catch (const UserError&) {
    WARN("skipped: this machine has no ::1");
    return;
  }
  const int port = local_port(probe.get());
  CHECK_THROWS_AS(connect_to("127.0.0.1", port, Patience(0.05)), CollectiveError);
  probe.reset();
  float sums[2] = {1, 2};
  std::string errors[2];
  const auto rank = [&](int r) {
    errors[r] = error_of([&] {
      JoinOptions options = options_of(r, 2, port, 20);
      options.host = "::1";
      const auto communicator = make_gloo_communicator(options);
      communicator->all_reduce(std::span<float>(&sums[r], 1), SumOrder::ranks);
      const auto split = communicator->split(0);
      split->all_reduce(std::span<float>(&sums[r], 1), SumOrder::ranks);
    });
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  for (int r = 0; r < 2; ++r) {
    CHECK(errors[r] == "");
    CHECK(sums[r] == 6);
  }
}

TEST_CASE("an IPv6 address is in brackets where a port follows, in keys and in messages") {
  const HostPort place = parse_host_port("[fd00::5]:29600", "dist.master");
  CHECK(place.host == "fd00::5");
  CHECK(place.port == 29600);
  CHECK(host_port_text(place.host, place.port) == "[fd00::5]:29600");
  CHECK(host_port_text("node0", 1) == "node0:1");
  for (const char* text : {"::1", "::1:29600", "fd00::5:29600"})
    CHECK(contains(error_of([&] { parse_host_port(text, "dist.master"); }), "[ADDRESS]:PORT"));
  CHECK(contains(error_of([&] { parse_host_port("[::1]", "dist.master"); }), "HOST:PORT"));
}

TEST_CASE("a master port in use is a user's error that names port and key") {
  const Fd taken = listen_on("127.0.0.1", 0);
  const int port = local_port(taken.get());
  CHECK_THROWS_AS(make_gloo_communicator(options_of(0, 2, port, 2)), UserError);
  const auto error = error_of([&] { make_gloo_communicator(options_of(0, 2, port, 2)); });
  INFO(error);
  CHECK(contains(error, "port " + std::to_string(port) + " is in use"));
  CHECK(contains(error, "dist.master"));
  // The same where all addresses are listened on.
  CHECK(contains(error_of([&] { listen_on("node0", port); }), "is in use"));
}

TEST_CASE("a master that is not there is an error at the deadline that names it") {
  const int port = free_port();
  const auto error = error_of([&] { make_gloo_communicator(options_of(1, 2, port, 0.5)); });
  INFO(error);
  CHECK(contains(error, "rank 1"));
  CHECK(contains(error, "dist.master 127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("a master's name that does not resolve is a user's error") {
  auto options = options_of(1, 2, 4711, 1);
  options.host = "no-such-host.invalid";
  const auto start = Clock::now();
  const auto error = error_of([&] { make_gloo_communicator(options); });
  INFO(error);
  CHECK(contains(error, "dist.master"));
  CHECK(contains(error, "no-such-host.invalid"));
  CHECK(Clock::now() - start > std::chrono::milliseconds(900));  // it may be known before the deadline
}

TEST_CASE("a silent program on the master's port is an error at the deadline") {
  const Fd silent = listen_on("127.0.0.1", 0);
  const auto error =
      error_of([&] { make_gloo_communicator(options_of(1, 2, local_port(silent.get()), 0.5)); });
  INFO(error);
  CHECK(contains(error, "did not all meet at dist.master"));
}

TEST_CASE("a rank that does not come to the start is named to those that did") {
  const int port = free_port();
  std::string errors[2];
  std::thread other(
      [&] { errors[1] = error_of([&] { make_gloo_communicator(options_of(1, 3, port, 1)); }); });
  errors[0] = error_of([&] { make_gloo_communicator(options_of(0, 3, port, 1)); });
  other.join();
  for (const auto& error : errors) {
    INFO(error);
    CHECK(contains(error, "rank 2 did not come to 127.0.0.1:" + std::to_string(port)));
  }
}

TEST_CASE("a stray connection does not disturb the rendezvous") {
  TcpStoreServer server("127.0.0.1", 0, 2, 20);
  const Fd stray = connect_to("127.0.0.1", server.port(), Patience(5));
  CHECK(write_all(stray.get(), "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", deadline_in(5)));
  const Fd silent = connect_to("127.0.0.1", server.port(), Patience(5));
  std::string errors[2];
  std::thread other([&] {
    errors[1] = error_of([&] { TcpStoreClient("127.0.0.1", server.port(), 1, 2, 20).set("a", "b"); });
  });
  errors[0] = error_of([&] { TcpStoreClient("127.0.0.1", server.port(), 0, 2, 20).get("a", Patience(10)); });
  other.join();
  CHECK(errors[0].empty());
  CHECK(errors[1].empty());
}

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
