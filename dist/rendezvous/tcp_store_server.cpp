#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>

#include "dist/rendezvous/tcp_store.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// Connections that have not said their rank, as ranks do at once; the oldest makes room for one more.
constexpr std::size_t kMostStrangers = 64;
constexpr auto kHelloWithin = std::chrono::seconds(10);
constexpr std::size_t kLongestHello = 512;
constexpr int kMostWarnings = 5;  // of refused connections
// Until the next attempt to take a connection if the process has no file descriptors left.
constexpr auto kBackOff = std::chrono::milliseconds(500);

struct Client {
  Fd fd;
  Clock::time_point since;
  int rank = -1;  // -1: a stranger so far
  std::string in, out;
  std::vector<std::string> wanted;  // keys asked for and not there yet
  bool left = false, gone = false, informed = false;
};

}  // namespace

struct TcpStoreServer::State {
  std::string host;
  int size;
  double timeout_s;
  std::string token;
  RunRanks run_ranks;
  Patience come_within;
  Fd listener, wake;
  std::vector<std::unique_ptr<Client>> clients;  // the serving thread's own, as what follows
  std::map<std::string, std::string> values;
  std::vector<bool> came;  // written under `mutex`
  struct Heard {
    std::uint64_t calls = 0;
    Clock::time_point at;
    double own = 0;  // seconds of `own_time`
  };
  std::vector<Heard> heard;  // by rank, written under `mutex`
  Patience own_time;
  int left_count = 0, warnings = 0;
  bool members = false;
  bool welcomed = false, stopped = false;
  std::string last_refusal;
  Clock::time_point accept_from;  // earlier there were no file descriptors
  bool out_of_descriptors = false;

  mutable std::mutex mutex;  // guards what follows up to `stop`
  std::string reason;
  bool by_rank = false;  // see reason_by_rank()
  int reason_rank = -1, reason_signal = 0;
  std::deque<Event> events;
  struct Told {
    int rank;
    std::string key, value;
    bool dismissed = false;
  };
  std::vector<Told> told;  // and not sent yet
  std::atomic<bool> stop{false};
  std::thread thread;

  void set_reason(const std::string& text, bool given_by_rank, int rank = -1, int signal = 0) {
    const std::lock_guard lock(mutex);
    if (!reason.empty()) return;
    reason = text.empty() ? "a rank gave up" : one_line(text);
    by_rank = given_by_rank;
    reason_rank = rank;
    reason_signal = signal;
  }

  std::string place() const { return host_port_text(host, local_port(listener.get())); }

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

  // Sends each rank the address under which rank 0's machine is seen from outside. If all are on this machine
  // and one came by IPv6, all use that: Gloo does not connect one family to the other.
  void welcome_all() {
    std::string outside, loopback;
    for (const auto& client : clients) {
      if (client->rank < 0) continue;
      const std::string address = local_address(client->fd.get());
      if (!is_loopback(address) && outside.empty()) outside = address;
      if (is_ipv6(address)) loopback = address;
    }
    if (outside.empty()) outside = loopback;
    for (const auto& client : clients)
      if (client->rank >= 0) queue(*client, Frame::welcome, outside);
    welcomed = true;
  }

  // "" if the sender is a rank that this run waits for.
  std::string refusal(const std::optional<Hello>& hello) const {
    if (!hello) return "it is of another version of Topknot, or another program";
    if (hello->token != token)
      return "the job tokens differ (dist.token, TOPKNOT_TOKEN, or the launcher's job): another job uses "
             "this address";
    if (members && hello->size > 0) return "elastic.min_ranks is missing: the run at this address is elastic";
    if (hello->size != (members ? -size : size))
      return fmt::format("rank {} was started for {} ranks, the run at this address has {}", hello->rank,
                         std::abs(hello->size), size);
    if (hello->rank < 0 || hello->rank >= size)
      return fmt::format("there is no rank {} among {}", hello->rank, size);
    if (came[hello->rank])
      return fmt::format(
          "rank {} is here already: two processes were started as this rank, or another job uses this "
          "address",
          hello->rank);
    return "";
  }

  // A stranger never harms the run.
  void refuse(Client& client, const std::string& why) {
    last_refusal = fmt::format("from {}: {}", peer_address(client.fd.get()), why);
    if (++warnings <= kMostWarnings)
      log_warning(fmt::format("refused a connection to {} {}{}", place(), last_refusal,
                              warnings == kMostWarnings ? "; further ones are not logged" : ""));
    queue(client, Frame::refused, why);
    client.gone = true;
  }

  void hello(Client& client, const std::string& payload) {
    const std::optional<Hello> hello = parse_hello(payload);
    if (const std::string why = refusal(hello); !why.empty()) return refuse(client, why);
    client.rank = hello->rank;
    {
      const std::lock_guard lock(mutex);
      came[client.rank] = true;
      heard[client.rank].own = own_time.passed();
    }
    if (members) {
      queue(client, Frame::welcome, "");
      for (const auto& [key, value] : values) queue(client, Frame::value, key + '\0' + value);
      note({Event::came, client.rank});
    } else if (!stopped && std::find(came.begin(), came.end(), false) == came.end()) {
      welcome_all();
    }
  }

  void note(Event event) {
    const std::lock_guard lock(mutex);
    if (event.kind == Event::left || event.kind == Event::lost) came[event.rank] = false;
    events.push_back(std::move(event));
  }

  void send_told() {
    std::vector<Told> all;
    {
      const std::lock_guard lock(mutex);
      all.swap(told);
    }
    for (const Told& one : all) {
      if (one.rank < 0) values[one.key] = one.value;
      for (const auto& client : clients) {
        if (client->rank < 0 || client->left || (one.rank >= 0 && client->rank != one.rank)) continue;
        if (one.dismissed)
          queue(*client, Frame::abort, '\0' + one.value), client->gone = true;
        else
          queue(*client, Frame::value, one.key + '\0' + one.value);
      }
    }
  }

  void handle(Client& client, Frame type, const std::string& payload) {
    const auto cut = payload.find('\0');
    {
      const std::lock_guard lock(mutex);
      Heard& rank = heard[client.rank];
      rank.at = Clock::now(), rank.own = own_time.passed();
      if (type == Frame::leave) rank.own = std::numeric_limits<double>::infinity();
      if (type == Frame::beat && payload.size() == sizeof rank.calls)
        std::memcpy(&rank.calls, payload.data(), payload.size());
    }
    switch (type) {
      case Frame::set:
        if (cut == std::string::npos) break;
        if (members) return note({Event::said, client.rank, payload});
        values[payload.substr(0, cut)] = payload.substr(cut + 1);
        for (const auto& other : clients) answer_waiting(*other);
        break;
      case Frame::get:
        client.wanted.push_back(payload);
        answer_waiting(client);
        break;
      case Frame::abort:
        if (payload.empty()) break;
        set_reason(payload.substr(1), true, client.rank, static_cast<unsigned char>(payload[0]));
        break;
      case Frame::beat:
        break;
      case Frame::ask:
        queue(client, Frame::peers, encode_peers(peers()));
        break;
      case Frame::leave:
        if (client.left) break;
        client.left = true;
        if (members) {
          note({Event::left, client.rank, payload});
          queue(client, Frame::all_left, "");
        } else if (++left_count == size)
          for (const auto& other : clients)
            if (other->rank >= 0) queue(*other, Frame::all_left, "");
        break;
      default:
        client.gone = true;
    }
  }

  std::vector<PeerState> peers() const {
    std::vector<PeerState> result;
    for (const Heard& rank : heard) {
      const auto silent =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - rank.at).count();
      result.push_back({rank.calls, static_cast<std::uint32_t>(std::min<std::int64_t>(silent, 0xffffffff))});
    }
    return result;
  }

  void read(Client& client) {
    char bytes[4096];
    for (;;) {
      const ssize_t n = recv(client.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n > 0) {
        client.in.append(bytes, static_cast<std::size_t>(n));
        if (client.rank < 0 && client.in.size() > kLongestHello) break;
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) client.gone = true;
      break;
    }
    try {
      Frame type;
      std::string payload;
      while (take_frame(client.in, type, payload, client.rank < 0 ? kLongestHello : kLongestPayload)) {
        if (client.rank >= 0) {
          handle(client, type, payload);
          continue;
        }
        if (type == Frame::hello)
          hello(client, payload);
        else
          client.gone = true;
        if (client.gone) return;
      }
    } catch (const Error&) {
      client.gone = true;  // what follows cannot be read
    }
  }

  void push_reason() {
    std::string text;
    {
      const std::lock_guard lock(mutex);
      if (reason.empty()) return;
      text = static_cast<char>(reason_signal) + reason;
    }
    stopped = true;
    for (const auto& client : clients) {
      if (client->rank < 0 || client->informed) continue;  // later clients are informed too
      client->informed = true;
      queue(*client, Frame::abort, text);
    }
  }

  void check_arrivals() {
    if (welcomed || !come_within.over()) return;
    std::string missing;
    for (int r = 0; r < size; ++r)
      if (!came[r]) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", run_rank(run_ranks, r));
    set_reason(
        fmt::format("rank {} did not come to {} within dist.timeout_s ({:g} s){}", missing, place(),
                    timeout_s, last_refusal.empty() ? "" : "; a connection was refused " + last_refusal),
        true);
  }

  // Accepts at most kMostStrangers connections, so that ranks are heard in between.
  void accept_some() {
    if (Clock::now() < accept_from) return;
    for (std::size_t i = 0; i < kMostStrangers; ++i) {
      Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd.valid()) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) back_off(errno_text());
        return;
      }
      out_of_descriptors = false;
      auto client = std::make_unique<Client>();
      client->fd = std::move(fd);
      client->since = Clock::now();
      clients.push_back(std::move(client));
    }
  }

  // The connection stays in the queue and would wake poll() again at once.
  void back_off(const std::string& error) {
    accept_from = Clock::now() + kBackOff;
    if (!out_of_descriptors)
      log_warning(
          fmt::format("{} cannot take a connection: {}; raise the limit (ulimit -n)", place(), error));
    out_of_descriptors = true;
  }

  // Closes those that had their time, and the oldest if there are too many.
  void drop_strangers() {
    std::size_t strangers = 0;
    for (const auto& client : clients) strangers += client->rank < 0;
    for (const auto& client : clients) {
      if (client->rank >= 0) continue;
      if (strangers > kMostStrangers || Clock::now() - client->since > kHelloWithin) {
        client->gone = true;
        --strangers;
      }
    }
  }

  void serve() {
    while (!stop) {
      const bool accepting = Clock::now() >= accept_from;
      std::vector<pollfd> entries{{wake.get(), POLLIN, 0}, {accepting ? listener.get() : -1, POLLIN, 0}};
      for (const auto& client : clients)
        entries.push_back(
            {client->fd.get(), static_cast<short>(client->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      poll(entries.data(), entries.size(), welcomed && accepting ? 1000 : 20);
      if (entries[0].revents != 0) {
        std::uint64_t count;
        [[maybe_unused]] const auto n = ::read(wake.get(), &count, sizeof count);
      }
      // Clients first: entries and clients still match.
      for (std::size_t i = 2; i < entries.size(); ++i) {
        if (entries[i].revents & POLLOUT) flush(*clients[i - 2]);
        if (entries[i].revents & ~POLLOUT) read(*clients[i - 2]);
      }
      accept_some();
      drop_strangers();
      send_told();
      for (const auto& client : clients)
        if (client->gone && client->rank >= 0 && !client->left && members)
          note({Event::lost, client->rank});
        else if (client->gone && client->rank >= 0 && !client->left)
          set_reason(rank_name(run_ranks, client->rank) + " died (its connections closed without a message)",
                     false, client->rank);
      for (const auto& client : clients)
        if (client->gone && client->rank >= 0) {
          const std::lock_guard lock(mutex);
          heard[client->rank].own = std::numeric_limits<double>::infinity();
        }
      std::erase_if(clients, [](const auto& client) { return client->gone; });
      check_arrivals();
      push_reason();
    }
    send_told();
    push_reason();
    for (const auto& client : clients)
      write_all(client->fd.get(), client->out, Clock::now() + std::chrono::milliseconds(200));
  }

  void wake_up() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(wake.get(), &one, sizeof one);
  }
};

TcpStoreServer::TcpStoreServer(const std::string& host, int port, int size, double timeout_s,
                               const std::string& token, const RunRanks& run_ranks)
    : TcpStoreServer(host, port, size, timeout_s, token, run_ranks, false) {}

TcpStoreServer::TcpStoreServer(const std::string& host, int port, int size, const std::string& token, Members)
    : TcpStoreServer(host, port, size, 0, token, {}, true) {}

TcpStoreServer::TcpStoreServer(const std::string& host, int port, int size, double timeout_s,
                               const std::string& token, const RunRanks& run_ranks, bool members)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.members = s.welcomed = members;
  s.host = host;
  s.size = size;
  s.timeout_s = timeout_s;
  s.token = token;
  s.run_ranks = run_ranks;
  s.came.resize(size);
  s.heard.resize(size);
  s.listener = listen_on(host, port);
  // A little before the clients give up by themselves, so that the missing ranks can be named to them.
  s.come_within = Patience(timeout_s - std::min(timeout_s / 10, 1.0));
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

std::optional<TcpStoreServer::Event> TcpStoreServer::next_event() {
  const std::lock_guard lock(state_->mutex);
  if (state_->events.empty()) return {};
  Event event = std::move(state_->events.front());
  state_->events.pop_front();
  return event;
}

void TcpStoreServer::tell(int rank, const std::string& key, const std::string& value) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->told.push_back({rank, key, value});
  }
  state_->wake_up();
}

void TcpStoreServer::dismiss(int rank, const std::string& reason) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->told.push_back({rank, "", reason, true});
  }
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

std::vector<int> TcpStoreServer::missing() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<int> ranks;
  for (int r = 0; r < state_->size; ++r)
    if (!state_->came[r]) ranks.push_back(r);
  return ranks;
}

int TcpStoreServer::frozen(const std::vector<int>& ranks, bool awaited) const {
  const std::lock_guard lock(state_->mutex);
  const double now = state_->own_time.passed();
  const auto& heard = state_->heard;
  const auto calls = [](const State::Heard& rank) { return rank.calls; };
  const std::uint64_t most = std::ranges::max(heard, {}, calls).calls;
  for (const int r : ranks) {
    const auto& rank = heard.at(static_cast<std::size_t>(r));
    if (rank.own > 0 && now - rank.own >= kFrozenSeconds * (awaited && rank.calls >= most ? 5 : 1)) return r;
  }
  return -1;
}

}  // namespace topknot
