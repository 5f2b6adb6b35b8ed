#include "dist/rendezvous/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>

#include "nn/base/log.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

std::string errno_text(int error) {
  return std::strerror(error);
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Asks until the deadline if the name server does not answer; for a minute if it does not know the name,
// which may be misspelt, or of a container that is still starting.
AddressList resolve(const std::string& host, int port, Deadline deadline) {
  const Deadline unknown_until = std::min(deadline, Clock::now() + std::chrono::seconds(60));
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error = 0;
  bool warned = false;
  while ((error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) != 0) {
    const std::string text = fmt::format("the host '{}' cannot be resolved ({})", host, gai_strerror(error));
    if (const int signal = stop_signal(); signal != 0)
      throw Interrupted(fmt::format("stopped by {}; {}", signal_name(signal), text), signal);
    const auto left = (error == EAI_AGAIN ? deadline : unknown_until) - Clock::now();
    if (left <= left.zero())
      throw UserError(
          text + "; give the name or address of the machine that rank 0 runs on, as dist.master=HOST:PORT");
    if (!warned)
      log_warning(fmt::format("{}; trying again for {} s", text,
                              std::chrono::ceil<std::chrono::seconds>(left).count()));
    warned = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  return {found, freeaddrinfo};
}

int poll_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

// Waits for `events` until the deadline; if there is a `patience`, until its end or a stop signal at most.
bool wait_for(int fd, short events, Deadline deadline, Patience* patience = nullptr) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, std::min(poll_ms(deadline), patience ? 100 : 1000));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (Clock::now() >= deadline || (patience && (patience->over() || stop_signal() != 0))) return false;
  }
}

// 0 or the error of one attempt.
int try_connect(const addrinfo& address, Patience& patience, Fd& result) {
  constexpr double kAttempt = 10;  // seconds; a host's next address may answer where this one does not
  Fd fd(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    if (!wait_for(fd.get(), POLLOUT, deadline_in(kAttempt), &patience)) return ETIMEDOUT;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return error;
  }
  // A connection to a free local port can meet itself (simultaneous open), where no server is.
  sockaddr_storage here{}, there{};
  socklen_t here_length = sizeof here, there_length = sizeof there;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here), &here_length);
  getpeername(fd.get(), reinterpret_cast<sockaddr*>(&there), &there_length);
  if (here_length == there_length && std::memcmp(&here, &there, here_length) == 0) return ECONNREFUSED;
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  result = std::move(fd);
  return 0;
}

// The number changes with the protocol.
constexpr std::string_view kGreeting = "topknot rendezvous 2\n";

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(std::string_view& from) {
  T value;
  std::memcpy(&value, from.data(), sizeof value);
  from.remove_prefix(sizeof value);
  return value;
}

}  // namespace

HostPort parse_host_port(const std::string& text, const std::string& key) {
  const auto colon = text.rfind(':');
  HostPort result;
  bool good = colon != std::string::npos && colon > 0;
  if (good) {
    const std::string host = text.substr(0, colon);
    result.host = without_brackets(host);
    if (is_ipv6(host) && host.front() != '[')
      throw UserError(
          fmt::format("{}: write the IPv6 address of '{}' in brackets, as [ADDRESS]:PORT", key, text));
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, result.port);
    good = parsed.ec == std::errc() && parsed.ptr == end && result.port > 0 && result.port < 65536 &&
           result.host.find_first_of("[]") == std::string::npos;
  }
  if (!good)
    throw UserError(key + ": '" + text + "' is not HOST:PORT with a port from 1 to 65535, for example " +
                    key + "=node0:29500");
  return result;
}

std::string host_port_text(const std::string& host, int port) {
  return (is_ipv6(host) ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

bool is_ipv6(const std::string& address) {
  return address.find(':') != std::string::npos;
}

std::string without_brackets(const std::string& host) {
  return host.size() > 2 && host.front() == '[' && host.back() == ']' ? host.substr(1, host.size() - 2)
                                                                      : host;
}

Fd listen_on(const std::string& host, int port) {
  const bool loopback6 = host == "::1";
  const bool loopback = host == "127.0.0.1" || host == "localhost";
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    if (loopback6 && family == AF_INET) continue;
    if (loopback && family == AF_INET6) continue;
    Fd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) {
      error = errno;
      continue;
    }
    const int on = 1, off = 0;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage address{};
    socklen_t length = 0;
    if (family == AF_INET6) {
      setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
      v6.sin6_family = AF_INET6;
      v6.sin6_addr = loopback6 ? in6addr_loopback : in6addr_any;
      v6.sin6_port = htons(static_cast<std::uint16_t>(port));
      length = sizeof v6;
    } else {
      auto& v4 = reinterpret_cast<sockaddr_in&>(address);
      v4.sin_family = AF_INET;
      v4.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
      v4.sin_port = htons(static_cast<std::uint16_t>(port));
      length = sizeof v4;
    }
    if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd.get(), 256) == 0)
      return fd;
    error = errno;
    if (error == EADDRINUSE || error == EACCES) break;  // the other family would not be better
  }
  if (error == EADDRINUSE)
    throw UserError("port " + std::to_string(port) +
                    " is in use on this machine; give another port, dist.master=HOST:PORT, to all ranks");
  throw UserError("cannot listen on port " + std::to_string(port) + " (" + errno_text(error) +
                  "); give another port, dist.master=HOST:PORT, to all ranks");
}

int local_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Fd connect_to(const std::string& host, int port, Patience patience, int server) {
  const std::string name = rank_name({}, server), where = name + "'s address " + host_port_text(host, port);
  // A name server's answer may take longer than Patience counts.
  const AddressList addresses =
      resolve(host, port, deadline_in(patience.limited() ? std::max(patience.left(), 1e-3) : 0));
  int error = ETIMEDOUT;
  do {
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      Fd fd;
      const int attempt = try_connect(*a, patience, fd);
      if (attempt == 0) return fd;
      error = attempt;
    }
    if (error == EMFILE || error == ENFILE)
      throw UserError("no connection to " + where + ": " + errno_text(error) +
                      "; raise the limit (ulimit -n)");
    if (const int signal = stop_signal(); signal != 0)
      throw Interrupted("stopped by " + signal_name(signal) + " while connecting to " + where);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (!patience.over());
  const char* zone =
      error == EINVAL && is_ipv6(host) ? "; a link-local address needs its interface, as fe80::1%eth0" : "";
  throw CollectiveError("no process answers at " + where + " (" + errno_text(error) + zone + "); is " + name +
                        " running on that machine, and does a firewall let the port through?");
}

namespace {

std::string numeric(const sockaddr_storage& address) {
  char text[NI_MAXHOST] = "";  // with the zone of a link-local address, without which nobody reaches it
  getnameinfo(reinterpret_cast<const sockaddr*>(&address),
              address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), text, sizeof text,
              nullptr, 0, NI_NUMERICHOST);
  const std::string result = text;
  // An IPv4 peer on a socket that listens for both families.
  return result.rfind("::ffff:", 0) == 0 ? result.substr(7) : result;
}

}  // namespace

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? numeric(address) : "";
}

std::string peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? numeric(address) : "";
}

bool is_loopback(const std::string& address) {
  return address == "::1" || address.rfind("127.", 0) == 0;
}

bool write_all(int fd, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t written = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd, POLLOUT, deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

std::string encode_frame(Frame type, std::string_view payload) {
  std::string result;
  result.reserve(2 * sizeof(std::uint32_t) + payload.size());
  put(result, static_cast<std::uint32_t>(type));
  put(result, static_cast<std::uint32_t>(payload.size()));
  result += payload;
  return result;
}

bool take_frame(std::string& buffer, Frame& type, std::string& payload, std::size_t longest_payload) {
  std::uint32_t header[2];
  if (buffer.size() < sizeof header) return false;
  std::memcpy(header, buffer.data(), sizeof header);
  if (header[0] < static_cast<std::uint32_t>(Frame::hello) ||
      header[0] > static_cast<std::uint32_t>(Frame::peers) || header[1] > longest_payload)
    throw Error("what came over the connection is not of a Topknot rendezvous");
  if (buffer.size() < sizeof header + header[1]) return false;
  type = static_cast<Frame>(header[0]);
  payload = buffer.substr(sizeof header, header[1]);
  buffer.erase(0, sizeof header + header[1]);
  return true;
}

std::string encode_hello(const Hello& hello) {
  std::string result(kGreeting);
  put(result, static_cast<std::int32_t>(hello.rank));
  put(result, static_cast<std::int32_t>(hello.size));
  return result + hello.token;
}

std::optional<Hello> parse_hello(std::string_view payload) {
  if (payload.substr(0, kGreeting.size()) != kGreeting) return {};
  payload.remove_prefix(kGreeting.size());
  if (payload.size() < 2 * sizeof(std::int32_t)) return {};
  Hello hello;
  hello.rank = take<std::int32_t>(payload);
  hello.size = take<std::int32_t>(payload);
  hello.token = payload;
  return hello;
}

std::string encode_peers(const std::vector<PeerState>& peers) {
  std::string result;
  for (const PeerState& peer : peers) {
    put(result, peer.calls);
    put(result, peer.silent);
  }
  return result;
}

std::vector<PeerState> parse_peers(std::string_view payload) {
  std::vector<PeerState> peers;
  while (payload.size() >= sizeof(PeerState::calls) + sizeof(PeerState::silent)) {
    const auto calls = take<std::uint64_t>(payload);
    peers.push_back({calls, take<std::uint32_t>(payload)});
  }
  return peers;
}

}  // namespace topknot
