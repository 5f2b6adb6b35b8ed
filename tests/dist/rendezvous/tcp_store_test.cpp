#include "dist/rendezvous/tcp_store.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "tests/dist/ranks.h"
#include "tests/support/free_port.h"

namespace topknot {
namespace {

JoinOptions options_of(int rank, int size, int port, double timeout_s) {
  JoinOptions options = join_options(rank, size, port, timeout_s);
  options.serve_store = rank == 0;
  return options;
}

constexpr double kTimeout = 60;
const std::string kToken = "the job's token";

// What comes back until the connection closes, or for a second where it stays open.
std::string answer(int fd) {
  std::string text;
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    char bytes[4096];
    if (poll(&entry, 1, 1000) <= 0) return text;
    const ssize_t n = recv(fd, bytes, sizeof bytes, 0);
    if (n <= 0) return text;
    text.append(bytes, static_cast<std::size_t>(n));
  }
}

std::string send_to(int port, std::string_view bytes) {
  const Fd fd = connect_to("127.0.0.1", port, Patience(20));
  write_all(fd.get(), bytes, deadline_in(5));
  return answer(fd.get());
}

std::string hello(int rank, int size, const std::string& token) {
  return encode_frame(Frame::hello, encode_hello({rank, size, token}));
}

std::string frame_header(std::uint32_t type, std::uint32_t bytes) {
  const std::uint32_t header[2] = {type, bytes};
  return {reinterpret_cast<const char*>(header), sizeof header};
}

struct Stranger {
  const char* name;
  void (*visit)(int port);
};

// A rank that is refused throws; the text says why.
void check_refused(int port, int rank, int size, const std::string& token, const std::string& why) {
  const std::string error =
      error_text<UserError>([&] { TcpStoreClient("127.0.0.1", port, rank, size, kTimeout, token); });
  CHECK(says(error, {"refuses this process", why}));
}

const Stranger kStrangers[] = {
    {"HTTP", [](int port) { CHECK(send_to(port, "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n").empty()); }},
    {"zeros", [](int port) { CHECK(send_to(port, std::string(100'000, '\0')).empty()); }},
    {"the hello of an earlier version",
     [](int port) {
       const std::string old = frame_header(1, 8) + std::string("\1\0\0\0\2\0\0\0", 8);
       CHECK(send_to(port, old).find("another version") != std::string::npos);
     }},
    {"half a hello", [](int port) { send_to(port, hello(1, 2, kToken).substr(0, 20)); }},
    {"a frame of 4 GB", [](int port) { CHECK(send_to(port, frame_header(1, 0xffffffff)).empty()); }},
    {"an abort from no rank",
     [](int port) { CHECK(send_to(port, encode_frame(Frame::abort, "\033[2Jgone")).empty()); }},
    {"a wrong size", [](int port) { check_refused(port, 1, 3, kToken, "was started for 3 ranks"); }},
    {"a rank that does not exist", [](int port) { check_refused(port, 7, 2, kToken, "no rank 7 among 2"); }},
    {"a negative rank", [](int port) { check_refused(port, -1, 2, kToken, "no rank -1"); }},
    {"another job", [](int port) { check_refused(port, 1, 2, "another", "tokens differ"); }},
    {"a job without a token", [](int port) { check_refused(port, 1, 2, "", "tokens differ"); }},
    {"many silent connections",
     [](int port) {
       std::vector<Fd> silent;
       for (int i = 0; i < 300; ++i) silent.push_back(connect_to("127.0.0.1", port, Patience(20)));
     }},
};

// Two ranks meet and exchange values, undisturbed by `visit`, which runs before, between and after.
void check_run(const std::function<void(int port, const std::string& when)>& visit) {
  TcpStoreServer server("127.0.0.1", 0, 2, kTimeout, kToken);
  visit(server.port(), "before");
  const auto errors = testing::errors_of_threads(2, [&](int r) {
    if (r == 0) visit(server.port(), "at the start");
    TcpStoreClient client("127.0.0.1", server.port(), r, 2, kTimeout, kToken);
    client.set(std::to_string(r), "here");
    client.get(std::to_string(1 - r), Patience(kTimeout));
    if (r == 0) visit(server.port(), "during");
    client.set("again " + std::to_string(r), "here");
    client.get("again " + std::to_string(1 - r), Patience(kTimeout));
  });
  CHECK(errors == std::vector<std::string>(2));
  CHECK(server.first_reason().empty());
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
  CHECK(error_text([&] {
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
  const auto errors = testing::errors_of_threads(2, [&](int r) {
    JoinOptions options = options_of(r, 2, port, 20);
    options.host = "::1";
    const auto communicator = make_gloo_communicator(options);
    communicator->all_reduce(std::span<float>(&sums[r], 1), SumOrder::ranks);
    communicator->split(0)->all_reduce(std::span<float>(&sums[r], 1), SumOrder::ranks);
  });
  for (int r = 0; r < 2; ++r) {
    CHECK(errors[r] == "");
    CHECK(sums[r] == 6);
  }
}

TEST_CASE("a link-local address keeps its zone, and the message of one without says what is missing") {
  std::string address;
  ifaddrs* interfaces = nullptr;
  REQUIRE(getifaddrs(&interfaces) == 0);
  for (const ifaddrs* at = interfaces; at; at = at->ifa_next) {
    char text[NI_MAXHOST] = "";
    if (at->ifa_addr && at->ifa_addr->sa_family == AF_INET6 &&
        getnameinfo(at->ifa_addr, sizeof(sockaddr_in6), text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 &&
        std::string(text).starts_with("fe80:"))
      address = text;
  }
  freeifaddrs(interfaces);
  if (address.empty()) {
    WARN("skipped: this machine has no link-local address");
    return;
  }
  const Fd server = listen_on(address, 0);
  const Fd client = connect_to(address, local_port(server.get()), Patience(5));
  CHECK(address.find('%') != std::string::npos);
  CHECK(local_address(client.get()) == address);
  CHECK(peer_address(client.get()) == address);
  const std::string bare = address.substr(0, address.find('%'));
  CHECK(contains(error_text([&] { connect_to(bare, local_port(server.get()), Patience(0.05)); }),
                 "as fe80::1%eth0"));
}

TEST_CASE("an IPv6 address is in brackets where a port follows, in keys and in messages") {
  const HostPort place = parse_host_port("[fd00::5]:29600", "dist.master");
  CHECK(place.host == "fd00::5");
  CHECK(place.port == 29600);
  CHECK(host_port_text(place.host, place.port) == "[fd00::5]:29600");
  CHECK(host_port_text("node0", 1) == "node0:1");
  for (const char* text : {"::1", "::1:29600", "fd00::5:29600"})
    CHECK(contains(error_text([&] { parse_host_port(text, "dist.master"); }), "[ADDRESS]:PORT"));
  CHECK(contains(error_text([&] { parse_host_port("[::1]", "dist.master"); }), "HOST:PORT"));
}

TEST_CASE("a master port in use is a user's error that names port and key") {
  const Fd taken = listen_on("127.0.0.1", 0);
  const int port = local_port(taken.get());
  CHECK_USER_ERROR(make_gloo_communicator(options_of(0, 2, port, 2)),
                   "port " + std::to_string(port) + " is in use", "dist.master");
  // The same where all addresses are listened on.
  CHECK(contains(error_text([&] { listen_on("node0", port); }), "is in use"));
}

TEST_CASE("a master that is not there, or a silent program on its port, is an error at the deadline") {
  const int port = free_port();
  CHECK_ERROR(make_gloo_communicator(options_of(1, 2, port, 0.5)), "rank 1",
              "rank 0's address 127.0.0.1:" + std::to_string(port));
  const Fd silent = listen_on("127.0.0.1", 0);
  CHECK_ERROR(make_gloo_communicator(options_of(1, 2, local_port(silent.get()), 0.5)),
              "did not all meet at rank 0's address");
}

TEST_CASE("a master's name that does not resolve is a user's error") {
  auto options = options_of(1, 2, 4711, 1);
  options.host = "no-such-host.invalid";
  const auto start = Clock::now();
  CHECK_ERROR(make_gloo_communicator(options), "dist.master", "no-such-host.invalid");
  CHECK(Clock::now() - start > std::chrono::milliseconds(900));  // it may be known before the deadline
}

TEST_CASE("a rank that does not come to the start is named to those that did") {
  const int port = free_port();
  for (const auto& error :
       testing::errors_of_threads(2, [&](int r) { make_gloo_communicator(options_of(r, 3, port, 1)); }))
    CHECK(says(error, {"rank 2 did not come to 127.0.0.1:" + std::to_string(port)}));
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

TEST_CASE("the report lists the calls of all ranks, equal ones together, and says whether peers are alive") {
  CHECK(report_peers({{811, 9800}, {800, 0}, {812, 200}, {812, 100}}, 1, 812, 2).calls ==
        "rank 0 #811 (silent for 9.8 s), ranks 1 to 3 #812");
  CHECK(report_peers({{5, 0}, {5, 0}}, 0, 5, 1).calls == "ranks 0 to 1 #5");
  std::vector<PeerState> many;
  for (std::uint64_t r = 0; r < 1000; ++r) many.push_back({r, 0});
  CHECK(report_peers(many, 0, 0, 1).calls.size() < 200);

  // Alive where each was heard of lately.
  CHECK(peers_alive({{1, 0}, {1, 1000}}, 0));
  CHECK(peers_alive({{1, 90000}, {1, 1000}}, 0));  // its own beats do not count
  CHECK_FALSE(peers_alive({{1, 0}, {1, 1500}}, 0));
}

TEST_CASE("a stranger is refused, before and during a run, and the run goes on") {
  for (const Stranger& stranger : kStrangers)
    check_run([&](int port, const std::string& when) {
      INFO(stranger.name << " " << when);
      stranger.visit(port);
    });
}

TEST_CASE("a second process of a rank is refused, and the first one goes on") {
  check_run([](int port, const std::string& when) {
    if (when == "during") check_refused(port, 1, 2, kToken, "rank 1 is here already");
  });
}

TEST_CASE("a sender that takes its time keeps nobody waiting") {
  TcpStoreServer server("127.0.0.1", 0, 1, kTimeout, kToken);
  const Fd slow = connect_to("127.0.0.1", server.port(), Patience(20));
  const std::string bytes = hello(0, 1, kToken);
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 8) {
    write_all(slow.get(), bytes.substr(i, 4), deadline_in(5));
    if (i == 16) TcpStoreClient("127.0.0.1", server.port(), 0, 1, kTimeout, kToken).set("a", "b");
  }
  CHECK(server.first_reason().empty());
}

TEST_CASE("a rank that missed the start learns which connection was refused instead") {
  TcpStoreServer server("127.0.0.1", 0, 2, 2, kToken);
  std::string error;
  std::thread other([&] {
    error = error_text<CollectiveError>([&] { TcpStoreClient("127.0.0.1", server.port(), 0, 2, 2, kToken); });
  });
  check_refused(server.port(), 1, 3, kToken, "was started for 3 ranks");
  other.join();
  CHECK(says(error, {"rank 1 did not come", "rank 1 was started for 3 ranks"}));
}

TEST_CASE("members come, speak, leave and are lost, each by itself, and come again") {
  TcpStoreServer server("127.0.0.1", 0, 2, kToken, TcpStoreServer::Members());
  using Event = TcpStoreServer::Event;
  const auto next = [&](Event::Kind kind, int rank, const std::string& text = "") {
    std::optional<Event> event;
    for (Patience patience(kTimeout); !event && !patience.over(); event = server.next_event())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(event);
    CHECK(event->kind == kind);
    CHECK(event->rank == rank);
    CHECK(event->text == text);
  };
  const auto member = [&](int rank) {
    return std::make_unique<TcpStoreClient>("127.0.0.1", server.port(), rank, -2, kTimeout, kToken);
  };
  server.tell(-1, "all", "a");
  auto one = member(1);  // without rank 0
  next(Event::came, 1);
  check_refused(server.port(), 1, -2, kToken, "rank 1 is here already");
  check_refused(server.port(), 0, 2, kToken, "elastic.min_ranks is missing");
  check_refused(server.port(), 0, -3, kToken,
                "rank 0 was started for 3 ranks, the run at this address has 2");
  auto zero = member(0);
  next(Event::came, 0);
  server.tell(0, "own", "b");
  CHECK(one->get("all", Patience(kTimeout)) == "a");
  CHECK(zero->get("own", Patience(kTimeout)) == "b");
  CHECK(zero->known("all") == "a");
  CHECK(one->known("own") == "");
  zero->set("key", "value");
  next(Event::said, 0, std::string("key\0value", 9));
  zero->set_last_words("bye");
  zero.reset();
  next(Event::left, 0, "bye");
  CHECK(one->first_reason({}) == "");
  zero = member(0);
  next(Event::came, 0);
  server.dismiss(1, "why");
  next(Event::lost, 1);
  CHECK(one->first_reason(std::chrono::seconds(10)) == "why");
  CHECK(zero->first_reason({}) == "");
  one = member(1);
  next(Event::came, 1);
}

TEST_CASE("a reason is escaped before anyone prints it") {
  TcpStoreServer server("127.0.0.1", 0, 2, kTimeout);
  std::string reason;
  std::thread other([&] {
    TcpStoreClient client("127.0.0.1", server.port(), 1, 2, kTimeout);
    reason = client.first_reason(std::chrono::seconds(20));
  });
  {
    TcpStoreClient client("127.0.0.1", server.port(), 0, 2, kTimeout);
    client.abort("\033[2Jred\a\x9b\nsecond line");
    other.join();
  }
  CHECK(reason == "\\x1b[2Jred\\x07\\x9b\\nsecond line");
  CHECK(server.first_reason() == reason);
}

TEST_CASE("without file descriptors the rendezvous waits without spinning, and goes on when there are some") {
  TcpStoreServer server("127.0.0.1", 0, 1, kTimeout);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const Fd visitor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(server.port()));
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(visitor.get()) + 1;
  setrlimit(RLIMIT_NOFILE, &none);
  const bool connected = connect(visitor.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  const auto processor_seconds = [] {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    return static_cast<double>(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
  };
  const double used = processor_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const double spent = processor_seconds() - used;
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK(connected);
  CHECK(spent < 0.5);
  TcpStoreClient("127.0.0.1", server.port(), 0, 1, kTimeout).set("a", "b");
  CHECK(server.first_reason().empty());
}

}  // namespace topknot
