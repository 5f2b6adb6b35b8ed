// Connections to the rendezvous that are no rank of the run: each is refused, and the run does not notice.

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>

#include "dist/comm/communicator.h"
#include "dist/rendezvous/tcp_store.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

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
  std::string error;
  try {
    TcpStoreClient("127.0.0.1", port, rank, size, kTimeout, token);
  } catch (const UserError& refused) {
    error = refused.what();
  }
  INFO(error);
  CHECK(error.find("refuses this process") != std::string::npos);
  CHECK(error.find(why) != std::string::npos);
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

// Two ranks meet and exchange values while `visit` runs before, between and after.
template <class Body>
std::vector<std::string> errors_of_run(const Body& visit) {
  TcpStoreServer server("127.0.0.1", 0, 2, kTimeout, kToken);
  std::vector<std::string> errors(2);
  const auto rank = [&](int r) {
    try {
      TcpStoreClient client("127.0.0.1", server.port(), r, 2, kTimeout, kToken);
      client.set(std::to_string(r), "here");
      client.get(std::to_string(1 - r), Patience(kTimeout));
      if (r == 0) visit(server.port(), "during");
      client.set("again " + std::to_string(r), "here");
      client.get("again " + std::to_string(1 - r), Patience(kTimeout));
    } catch (const std::exception& error) {
      errors[r] = error.what();
    }
  };
  visit(server.port(), "before");
  std::thread first([&] { rank(1); });
  visit(server.port(), "at the start");
  rank(0);
  first.join();
  errors.push_back(server.first_reason());
  return errors;
}

}  // namespace

TEST_CASE("a stranger is refused, before and during a run, and the run goes on") {
  for (const Stranger& stranger : kStrangers) {
    const auto errors = errors_of_run([&](int port, const char* when) {
      INFO(stranger.name << " " << when);
      stranger.visit(port);
    });
    INFO(stranger.name);
    for (const auto& error : errors) CHECK(error.empty());
  }
}

TEST_CASE("a second process of a rank is refused, and the first one goes on") {
  const auto errors = errors_of_run([&](int port, const char* when) {
    if (std::strcmp(when, "during") == 0) check_refused(port, 1, 2, kToken, "rank 1 is here already");
  });
  for (const auto& error : errors) CHECK(error.empty());
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
    try {
      TcpStoreClient("127.0.0.1", server.port(), 0, 2, 2, kToken);
    } catch (const CollectiveError& late) {
      error = late.what();
    }
  });
  check_refused(server.port(), 1, 3, kToken, "was started for 3 ranks");
  other.join();
  INFO(error);
  CHECK(error.find("rank 1 did not come") != std::string::npos);
  CHECK(error.find("rank 1 was started for 3 ranks") != std::string::npos);
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
