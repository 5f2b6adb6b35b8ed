#pragma once
// TCP ports of this machine for tests.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>

namespace topknot {

// Listens on a port of 127.0.0.1 that was free, as long as it lives.
class HeldPort {
 public:
  HeldPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = sizeof address;
    if (bind(socket_, any, length) != 0 || listen(socket_, 1) != 0 || getsockname(socket_, any, &length) != 0)
      throw std::runtime_error("no port to be had on 127.0.0.1");
    number_ = ntohs(address.sin_port);
  }
  ~HeldPort() { close(socket_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;
  int number() const { return number_; }

 private:
  int socket_ = -1;
  int number_ = 0;
};

// A port that was free a moment ago.
inline int free_port() {
  return HeldPort().number();
}

}  // namespace topknot
