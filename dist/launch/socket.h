#pragma once
// What the rendezvous needs of TCP: connecting with a deadline, and listening. No call
// waits without a deadline.

#include <string>
#include <string_view>

#include "nn/base/clock.h"
#include "nn/base/file.h"

namespace topknot {

struct HostPort {
  std::string host;
  int port = 0;
};
// "node0:29500" or "[::1]:29500"; throws UserError naming `key`.
HostPort parse_host_port(const std::string& text, const std::string& key);
// As parse_host_port() reads it.
std::string host_port_text(const std::string& host, int port);
bool is_ipv6(const std::string& address);  // of a numeric address, without brackets
// Without the brackets of an IPv6 address.
std::string without_brackets(const std::string& host);

// A listening socket: on 127.0.0.1 where `host` is "127.0.0.1" or "localhost", on ::1 where it is that, else on every address of this
// machine (a host's own name may resolve to a loopback address on itself). Port 0 picks a free one. Throws
// UserError when the port cannot be had.
Fd listen_on(const std::string& host, int port);
int local_port(int fd);

// Tries as long as the patience lasts, since the other side may start later. Throws UserError for a name that does not
// resolve within a minute and where this process has no file descriptors left, CollectiveError when no process answers
// in time, and Interrupted after a stop signal.
Fd connect_to(const std::string& host, int port, Patience patience);

// The numeric addresses of this end of a connection and of the other, and whether one is a loopback address.
std::string local_address(int fd);
std::string peer_address(int fd);
bool is_loopback(const std::string& address);

// Writes all bytes; false when the connection is gone or the deadline passed.
bool write_all(int fd, std::string_view bytes, Deadline deadline);

}  // namespace topknot
