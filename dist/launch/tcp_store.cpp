#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "dist/comm/communicator.h"
#include "dist/launch/tcp_store.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

struct Client {
  Fd fd;
  int rank = -1;
  std::string in, out;
  std::vector<std::string> wanted;  // keys asked for and not there yet
  bool left = false, gone = false, informed = false;
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

  mutable std::mutex mutex;  // guards what follows up to `stop`
  std::string reason;
  bool by_rank = false;  // a rank gave the reason itself
  int reason_rank = -1;
  std::atomic<bool> stop{false};
  std::thread thread;

  void set_reason(const std::string& text, bool given_by_rank, int rank = -1) {
    const std::lock_guard lock(mutex);
    if (!reason.empty()) return;
    reason = text;
    by_rank = given_by_rank;
    reason_rank = rank;
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

  // All ranks are here: each is sent the address under which rank 0's machine is seen from outside.
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
      problem = fmt::format("rank {} was started for {} ranks, the master for {}", rank, numbers[1], size);
    else if (rank < 0 || rank >= size || came[rank])
      problem = fmt::format(
          "two processes say that they are rank {}; does an older run still use this dist.master?", rank);
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
        set_reason(payload, true, client.rank);
        break;
      case Frame::leave: {
        if (client.left) break;
        client.left = true;
        if (++left_count == size)
          for (const auto& other : clients) queue(*other, Frame::all_left, "");
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
      if (client->rank < 0 || client->informed) continue;  // later clients are informed too
      client->informed = true;
      queue(*client, Frame::abort, text);
    }
  }

  void check_arrivals() {
    if (welcomed || Clock::now() < come_by) return;
    std::string missing;
    for (int r = 0; r < size; ++r)
      if (!came[r]) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
    set_reason(fmt::format("rank {} did not come to {}:{} within dist.timeout_s ({:g} s)", missing, host,
                           local_port(listener.get()), timeout_s),
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
          set_reason(fmt::format("rank {} died (its connections closed without a message)", client->rank),
                     false, client->rank);
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
  // A little before the clients give up by themselves, so that the missing ranks can be named to them.
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

bool TcpStoreServer::reason_by_rank() const {
  const std::lock_guard lock(state_->mutex);
  return state_->by_rank;
}

int TcpStoreServer::first_reason_rank() const {
  const std::lock_guard lock(state_->mutex);
  return state_->reason_rank;
}

TcpStoreClient::TcpStoreClient(const std::string& host, int port, int rank, int size, double timeout_s)
    : where_(fmt::format("{}:{}", host, port)), rank_(rank) {
  const Deadline deadline = deadline_in(timeout_s);
  try {
    fd_ = connect_to(host, port, deadline);
  } catch (const CollectiveError& error) {
    throw CollectiveError(fmt::format("rank {}: {}", rank, error.what()));
  }
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TOPKNOT_CHECK(wake_.valid(), "no event descriptor could be had");
  const std::int32_t numbers[2] = {rank, size};
  const std::string_view payload(reinterpret_cast<const char*>(numbers), sizeof numbers);
  write_all(fd_.get(), encode_frame(Frame::hello, payload), deadline);
  reader_ = std::thread([this] { read_loop(); });

  std::string problem;
  {
    std::unique_lock lock(mutex_);
    // Counted from now: the server, which was there before, gives up a little earlier and says who is
    // missing.
    changed_.wait_until(lock, deadline_in(timeout_s), [&] { return welcomed_ || !reason_.empty(); });
    if (!welcomed_)
      problem =
          !reason_.empty() ? reason_ : "the ranks did not all meet at dist.master " + where_ + " in time";
    leaving_ = !welcomed_;
  }
  if (!problem.empty()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = write(wake_.get(), &one, sizeof one);
    reader_.join();
    throw CollectiveError(fmt::format("rank {}: {}", rank, problem));
  }
  address_ = local_address(fd_.get());
  // A rank that reaches the master over loopback runs on the master's machine.
  if (is_loopback(address_) && !welcome_.empty()) address_ = welcome_;
}

TcpStoreClient::~TcpStoreClient() {
  {
    std::unique_lock lock(mutex_);
    if (reason_.empty()) {
      leaving_ = true;
      lock.unlock();
      {
        const std::lock_guard write_lock(write_mutex_);
        write_all(fd_.get(), encode_frame(Frame::leave, ""), Clock::now() + std::chrono::milliseconds(500));
      }
      lock.lock();
      // Closing before the others have read the last messages could reset their connections.
      changed_.wait_for(lock, std::chrono::seconds(2),
                        [&] { return all_left_ || closed_ || !reason_.empty(); });
    }
    leaving_ = true;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = write(wake_.get(), &one, sizeof one);
  reader_.join();
}

void TcpStoreClient::read_loop() {
  std::string buffer;
  for (;;) {
    pollfd entries[2] = {{fd_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (poll(entries, 2, -1) < 0 && errno != EINTR) break;
    if (entries[1].revents != 0) return;
    if (entries[0].revents == 0) continue;
    char bytes[4096];
    const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) break;
    buffer.append(bytes, static_cast<std::size_t>(n));
    try {
      Frame type;
      std::string payload;
      while (take_frame(buffer, type, payload)) handle(type, std::move(payload));
    } catch (const Error& error) {
      learn_reason(std::string(error.what()) + " (dist.master " + where_ +
                   "); is another program on that port?");
      return;
    }
  }
  bool expected;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    expected = leaving_;
  }
  changed_.notify_all();
  if (!expected)
    learn_reason("the rendezvous at " + where_ + " closed (rank 0 or the launcher ended or died)");
}

void TcpStoreClient::handle(Frame type, std::string payload) {
  if (type == Frame::abort) return learn_reason(payload);
  {
    const std::lock_guard lock(mutex_);
    if (type == Frame::welcome) {
      welcome_ = std::move(payload);
      welcomed_ = true;
    } else if (type == Frame::value) {
      const auto cut = payload.find('\0');
      if (cut != std::string::npos) values_[payload.substr(0, cut)] = payload.substr(cut + 1);
    } else if (type == Frame::all_left) {
      all_left_ = true;
    }
  }
  changed_.notify_all();
}

void TcpStoreClient::learn_reason(const std::string& reason) {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason.empty() ? "a rank gave up" : reason;
    callback = std::move(callback_);
    callback_ = nullptr;
  }
  changed_.notify_all();
  if (callback) callback();
}

void TcpStoreClient::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(write_mutex_);
  write_all(fd_.get(), encode_frame(Frame::set, key + '\0' + value), Clock::now() + std::chrono::seconds(5));
}

std::string TcpStoreClient::get(const std::string& key, Deadline deadline) {
  {
    const std::lock_guard lock(write_mutex_);
    write_all(fd_.get(), encode_frame(Frame::get, key), deadline);
  }
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return values_.count(key) != 0 || !reason_.empty(); });
  const auto found = values_.find(key);
  if (found != values_.end()) return found->second;
  throw CollectiveError(!reason_.empty() ? reason_
                                         : "a peer did not publish '" + key + "' at " + where_ + " in time");
}

void TcpStoreClient::abort(const std::string& reason) noexcept {
  try {
    const std::lock_guard lock(write_mutex_);
    write_all(fd_.get(), encode_frame(Frame::abort, reason), Clock::now() + std::chrono::milliseconds(500));
  } catch (...) {
    // Out of memory, or a mutex that failed: the closing connections inform the peers.
  }
}

std::string TcpStoreClient::first_reason(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return !reason_.empty(); });
  return reason_;
}

void TcpStoreClient::on_abort(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) {
      callback_ = std::move(callback);
      return;
    }
  }
  callback();
}

}  // namespace topknot
