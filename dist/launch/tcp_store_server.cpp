#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "dist/launch/tcp_store.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

struct Client {
  Fd fd;
  int rank = -1;
  std::string in, out;
  std::vector<std::string> wanted;  // keys asked for and not there yet
  bool left = false, gone = false, told = false;
};

}  // namespace

struct TcpStoreServer::State {
  std::string host;
  int size;
  double timeout_s;
  Deadline come_by;
  Fd listener, wake;
  std::vector<std::unique_ptr<Client>> clients;  // the serving thread's own, as what follows
  std::map<std::string, std::string> values;
  std::vector<bool> came;
  int left_count = 0;
  bool welcomed = false, stopped = false;

  mutable std::mutex mutex;  // guards reason and told
  std::string reason;
  bool told = false;
  std::atomic<bool> stop{false};
  std::thread thread;

  void set_reason(const std::string& text, bool by_rank) {
    const std::lock_guard lock(mutex);
    if (!reason.empty()) return;
    reason = text;
    told = by_rank;
  }

  void queue(Client& client, Frame type, const std::string& payload) {
    client.out += encode_frame(type, payload);
    flush(client);
  }

  void flush(Client& client) {
    while (!client.out.empty() && client.fd.valid()) {
      const ssize_t n =
          send(client.fd.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        client.out.erase(0, static_cast<std::size_t>(n));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      } else if (errno != EINTR) {
        client.out.clear();
      }
    }
  }

  void answer_waiting(Client& client) {
    std::erase_if(client.wanted, [&](const std::string& key) {
      const auto found = values.find(key);
      if (found == values.end()) return false;
      queue(client, Frame::value, key + '\0' + found->second);
      return true;
    });
  }

  // Everybody is here: tell all of them under which address rank 0's machine is seen from outside.
  void welcome_all() {
    std::string outside;
    for (const auto& client : clients) {
      const std::string address = local_address(client->fd.get());
      if (client->rank >= 0 && !is_loopback(address) && outside.empty()) outside = address;
    }
    for (const auto& client : clients)
      if (client->rank >= 0) queue(*client, Frame::welcome, outside);
    welcomed = true;
  }

  void hello(Client& client, const std::string& payload) {
    std::int32_t numbers[2];
    if (payload.size() != sizeof numbers) {
      client.gone = true;
      return;
    }
    std::memcpy(numbers, payload.data(), sizeof numbers);
    const int rank = numbers[0];
    std::string problem;
    if (numbers[1] != size)
      problem = "rank " + std::to_string(rank) + " was started for " + std::to_string(numbers[1]) +
                " ranks, the master for " + std::to_string(size);
    else if (rank < 0 || rank >= size || came[rank])
      problem = "two processes say that they are rank " + std::to_string(rank) +
                "; does an older run still use this dist.master?";
    client.rank = std::max(rank, 0);
    if (!problem.empty()) return set_reason(problem, true);
    came[rank] = true;
    if (!stopped && std::find(came.begin(), came.end(), false) == came.end()) welcome_all();
  }

  void handle(Client& client, Frame type, const std::string& payload) {
    const auto cut = payload.find('\0');
    switch (type) {
      case Frame::hello:
        hello(client, payload);
        break;
      case Frame::set:
        if (cut == std::string::npos) break;
        values[payload.substr(0, cut)] = payload.substr(cut + 1);
        for (const auto& other : clients) answer_waiting(*other);
        break;
      case Frame::get:
        client.wanted.push_back(payload);
        answer_waiting(client);
        break;
      case Frame::abort:
        set_reason(payload, true);
        break;
      case Frame::bye: {
        if (client.left) break;
        client.left = true;
        if (++left_count == size)
          for (const auto& other : clients) queue(*other, Frame::bye_all, "");
        break;
      }
      default:
        client.gone = true;
    }
  }

  void read(Client& client) {
    char bytes[4096];
    for (;;) {
      const ssize_t n = recv(client.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n > 0) {
        client.in.append(bytes, static_cast<std::size_t>(n));
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) client.gone = true;
      break;
    }
    try {
      Frame type;
      std::string payload;
      while (take_frame(client.in, type, payload)) {
        if (client.rank < 0 && type != Frame::hello) {
          client.gone = true;  // a stray connection
          return;
        }
        handle(client, type, payload);
      }
    } catch (const Error&) {
      client.gone = true;
    }
  }

  void push_reason() {
    std::string text;
    {
      const std::lock_guard lock(mutex);
      text = reason;
    }
    if (text.empty()) return;
    stopped = true;
    for (const auto& client : clients) {
      if (client->rank < 0 || client->told) continue;  // who comes later is told too
      client->told = true;
      queue(*client, Frame::abort, text);
    }
  }

  void check_arrivals() {
    if (welcomed || Clock::now() < come_by) return;
    std::string missing;
    for (int r = 0; r < size; ++r)
      if (!came[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", timeout_s);
    set_reason("rank " + missing + " did not come to " + host + ":" +
                   std::to_string(local_port(listener.get())) + " within dist.timeout_s (" + seconds + " s)",
               false);
  }

  void accept_all() {
    for (;;) {
      Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd.valid()) return;
      auto client = std::make_unique<Client>();
      client->fd = std::move(fd);
      clients.push_back(std::move(client));
    }
  }

  void serve() {
    while (!stop) {
      std::vector<pollfd> entries{{wake.get(), POLLIN, 0}, {listener.get(), POLLIN, 0}};
      for (const auto& client : clients)
        entries.push_back(
            {client->fd.get(), static_cast<short>(client->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      poll(entries.data(), entries.size(), welcomed ? 1000 : 20);
      if (entries[0].revents != 0) {
        std::uint64_t count;
        [[maybe_unused]] const auto n = ::read(wake.get(), &count, sizeof count);
      }
      // Clients first: entries and clients still match.
      for (std::size_t i = 2; i < entries.size(); ++i) {
        if (entries[i].revents & POLLOUT) flush(*clients[i - 2]);
        if (entries[i].revents & ~POLLOUT) read(*clients[i - 2]);
      }
      accept_all();
      for (const auto& client : clients)
        if (client->gone && client->rank >= 0 && !client->left)
          set_reason("rank " + std::to_string(client->rank) + " died (its connections closed without a word)",
                     false);
      std::erase_if(clients, [](const auto& client) { return client->gone; });
      check_arrivals();
      push_reason();
    }
    push_reason();
    for (const auto& client : clients)
      write_all(client->fd.get(), client->out, Clock::now() + std::chrono::milliseconds(200));
  }

  void wake_up() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(wake.get(), &one, sizeof one);
  }
};

TcpStoreServer::TcpStoreServer(const std::string& host, int port, int size, double timeout_s)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.host = host;
  s.size = size;
  s.timeout_s = timeout_s;
  s.came.resize(size);
  s.listener = listen_on(host, port);
  // A little before the clients give up by themselves, so that they can be told who is missing.
  const auto limit = timeout_ms(timeout_s);
  s.come_by = Clock::now() + limit - std::min(limit / 10, std::chrono::milliseconds(1000));
  s.wake = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TOPKNOT_CHECK(s.wake.valid(), "no event descriptor could be had");
  s.thread = std::thread([&s] { s.serve(); });
}

TcpStoreServer::~TcpStoreServer() {
  state_->stop = true;
  state_->wake_up();
  state_->thread.join();
}

int TcpStoreServer::port() const {
  return local_port(state_->listener.get());
}

void TcpStoreServer::abort(const std::string& reason) {
  state_->set_reason(reason, true);
  state_->wake_up();
}

std::string TcpStoreServer::first_reason() const {
  const std::lock_guard lock(state_->mutex);
  return state_->reason;
}

bool TcpStoreServer::reason_was_told() const {
  const std::lock_guard lock(state_->mutex);
  return state_->told;
}

}  // namespace topknot
