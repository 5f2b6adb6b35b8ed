#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

// After sys/ioctl.h.
#include <linux/sockios.h>

#include <cerrno>

#include "dist/rendezvous/tcp_store.h"
#include "nn/base/program.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

constexpr auto kTick = std::chrono::milliseconds(200);
constexpr double kBeatSeconds = 0.5;
// After the server closed a waiting rank's connection, as it does where strangers come in large numbers.
constexpr double kReconnectSeconds = 2;
constexpr int kMostReconnects = 20;
constexpr double kWriteSeconds = 5;  // for a short message to the server

}  // namespace

TcpStoreClient::TcpStoreClient(const std::string& host, int port, int rank, int size, double timeout_s,
                               const std::string& token, const RunRanks& run_ranks,
                               const MeetingPatience& meeting)
    : where_(host_port_text(host, port)), rank_(rank), run_ranks_(run_ranks) {
  std::string buffer;
  const std::string me = rank_name(run_ranks, rank) + ": ";
  try {
    fd_ = connect_to(host, port, Patience(timeout_s), run_rank(run_ranks, 0));
    wait_for_all(host, port, encode_frame(Frame::hello, encode_hello({rank, size, token})), timeout_s,
                 meeting, buffer);
  } catch (const CollectiveError& error) {
    throw CollectiveError(me + error.what());
  } catch (const Interrupted& error) {
    throw Interrupted(me + error.what(), error.signal);
  } catch (const UserError& error) {
    throw UserError(me + error.what());
  }
  address_ = local_address(fd_.get());
  // A rank that reaches the master over loopback runs on the master's machine.
  if (is_loopback(address_) && !welcome_.empty()) address_ = welcome_;
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TOPKNOT_CHECK(wake_.valid(), "no event descriptor could be had");
  reader_ = std::thread([this, buffer = std::move(buffer)] { read_loop(buffer); });
}

// Until all ranks have come. What the server sent after that is left in `buffer`.
void TcpStoreClient::wait_for_all(const std::string& host, int port, const std::string& hello,
                                  double timeout_s, const MeetingPatience& meeting, std::string& buffer) {
  // Counted from now: the server, which was there before, gives up a little earlier and says who is missing.
  Patience patience(meeting.unlimited ? 0 : timeout_s);
  std::optional<Patience> stopping;
  write_all(fd_.get(), hello, deadline_in(kWriteSeconds));
  for (int reconnects = 0;;) {
    pollfd entry{fd_.get(), POLLIN, 0};
    poll(&entry, 1, 50);
    char bytes[4096];
    const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    const bool closed = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK);
    if (n > 0) buffer.append(bytes, static_cast<std::size_t>(n));
    Frame type;
    std::string payload;
    const auto next_frame = [&] {
      try {
        return take_frame(buffer, type, payload);
      } catch (const Error& error) {
        throw CollectiveError(
            fmt::format("{} ({}); is another program on that port?", error.what(), server()));
      }
    };
    while (next_frame()) {
      if (type == Frame::welcome) {
        welcome_ = payload;
        return;
      }
      if (type == Frame::refused)
        throw UserError(
            fmt::format("{} refuses this process: {}; give every job a dist.master of its own, and every "
                        "process of a job its own rank",
                        server(), one_line(payload)));
      if (type == Frame::abort) handle(type, payload);
      if (signal_ != 0) throw Interrupted(reason_, signal_);
      if (!reason_.empty()) throw CollectiveError(reason_);
    }
    beat_if_due();
    if (stop_signal() != 0 && !stopping) stopping.emplace(meeting.after_stop_s);
    if (const int signal = stop_signal(); signal != 0 && stopping->left() <= 0) {
      const std::string why =
          fmt::format("stopped by {} while waiting for the other ranks at {}", signal_name(signal), server());
      abort(rank_name(run_ranks_, rank_) + ": " + why);
      throw Interrupted(why, signal);
    }
    if (patience.over()) throw CollectiveError("the ranks did not all meet at " + server() + " in time");
    if (!closed) continue;
    const std::string lost = "the rendezvous at " + where_ + " closed before all ranks had met (" +
                             rank_name(run_ranks_, 0) +
                             " or the launcher ended or died, or another program is on that port)";
    if (++reconnects > kMostReconnects) throw CollectiveError(lost);
    buffer.clear();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    try {
      fd_ = connect_to(host, port, Patience(kReconnectSeconds), run_rank(run_ranks_, 0));
    } catch (const CollectiveError&) {
      throw CollectiveError(lost);
    }
    write_all(fd_.get(), hello, deadline_in(kWriteSeconds));
  }
}

TcpStoreClient::~TcpStoreClient() {
  {
    std::unique_lock lock(mutex_);
    if (reason_.empty() && !aborted_) {
      leaving_ = true;
      lock.unlock();
      {
        const std::lock_guard write_lock(write_mutex_);
        write_all(fd_.get(), encode_frame(Frame::leave, last_words_),
                  Clock::now() + std::chrono::milliseconds(500));
      }
      lock.lock();
      // Closing before the others have read the last messages could reset their connections.
      Patience patience(2);
      const auto over = [&] { return all_left_ || closed_ || !reason_.empty(); };
      while (!patience.over() && !changed_.wait_for(lock, kTick, over)) {
      }
    }
    leaving_ = true;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = write(wake_.get(), &one, sizeof one);
  reader_.join();
}

void TcpStoreClient::read_loop(std::string buffer) {
  for (bool unread = true;; unread = false) {
    pollfd entries[2] = {{fd_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (poll(entries, 2, unread ? 0 : static_cast<int>(kTick.count())) < 0 && errno != EINTR) break;
    if (entries[1].revents != 0) return;
    beat_if_due();
    tick();
    if (entries[0].revents == 0 && !unread) continue;
    if (entries[0].revents != 0) {
      char bytes[4096];
      const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n <= 0) break;
      buffer.append(bytes, static_cast<std::size_t>(n));
    }
    try {
      Frame type;
      std::string payload;
      while (take_frame(buffer, type, payload)) handle(type, std::move(payload));
    } catch (const Error& error) {
      learn_reason(fmt::format("{} ({}); is another program on that port?", error.what(), server()), 0);
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
    learn_reason("the rendezvous at " + where_ + " closed (" + rank_name(run_ranks_, 0) +
                     " or the launcher ended or died)",
                 0);
}

void TcpStoreClient::beat_if_due() {
  if (next_beat_.left() > 0) return;
  next_beat_ = Patience(kBeatSeconds);
  const std::uint64_t calls = calls_;
  send_soon(encode_frame(Frame::beat, {reinterpret_cast<const char*>(&calls), sizeof calls}));
}

void TcpStoreClient::tick() {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    callback = on_tick_;
  }
  if (callback) callback();
}

void TcpStoreClient::handle(Frame type, std::string payload) {
  if (type == Frame::abort && !payload.empty())
    return learn_reason(payload.substr(1), static_cast<unsigned char>(payload[0]));
  {
    const std::lock_guard lock(mutex_);
    if (type == Frame::value) {
      const auto cut = payload.find('\0');
      if (cut != std::string::npos) values_[payload.substr(0, cut)] = payload.substr(cut + 1);
    } else if (type == Frame::all_left) {
      all_left_ = true;
    } else if (type == Frame::peers) {
      peers_ = parse_peers(payload);
      peers_at_ = Clock::now();
    }
  }
  changed_.notify_all();
}

void TcpStoreClient::learn_reason(const std::string& reason, int signal) {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason.empty() ? "a rank gave up" : one_line(reason);
    signal_ = signal;
    callback = std::move(on_abort_);
    on_abort_ = nullptr;
  }
  changed_.notify_all();
  if (callback) callback();
}

// Does not wait: neither for another thread that writes nor for a server that does not read.
void TcpStoreClient::send_soon(const std::string& frame) {
  const std::unique_lock lock(write_mutex_, std::try_to_lock);
  int unsent = 0;
  if (!lock.owns_lock() || ioctl(fd_.get(), SIOCOUTQ, &unsent) != 0 || unsent > 4096) return;
  write_all(fd_.get(), frame, Clock::now());
}

void TcpStoreClient::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(write_mutex_);
  write_all(fd_.get(), encode_frame(Frame::set, key + '\0' + value), deadline_in(kWriteSeconds));
}

std::string TcpStoreClient::get(const std::string& key, Patience& patience, int rank) {
  {
    const std::lock_guard lock(write_mutex_);
    write_all(fd_.get(), encode_frame(Frame::get, key), deadline_in(kWriteSeconds));
  }
  StopGracePeriod after_signal;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait_for(lock, kTick, [&] { return values_.count(key) != 0 || !reason_.empty(); });
    const auto found = values_.find(key);
    if (found != values_.end()) return found->second;
    if (!reason_.empty()) break;
    if (after_signal.ended(values_.size(), false))
      throw Interrupted("stopped by " + signal_name(stop_signal()) + " while waiting for the other ranks");
    if (patience.over()) break;
  }
  if (signal_ != 0) throw Interrupted(reason_, signal_);
  if (!reason_.empty()) throw CollectiveError(reason_);
  throw CollectiveError(fmt::format("{} did not publish '{}' at {} in time",
                                    rank < 0 ? "a peer" : rank_name(run_ranks_, rank), key, where_));
}

void TcpStoreClient::abort(const std::string& reason) noexcept {
  try {
    aborted_ = true;
    const std::lock_guard lock(write_mutex_);
    write_all(fd_.get(), encode_frame(Frame::abort, static_cast<char>(stop_signal()) + reason),
              Clock::now() + std::chrono::milliseconds(500));
  } catch (...) {
    // Out of memory, or a mutex that failed: the closing connections inform the peers.
  }
}

std::string TcpStoreClient::first_reason(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return !reason_.empty(); });
  return reason_;
}

std::string TcpStoreClient::known(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  return found == values_.end() ? "" : found->second;
}

int TcpStoreClient::first_signal() {
  const std::lock_guard lock(mutex_);
  return signal_;
}

std::optional<std::vector<PeerState>> TcpStoreClient::peers(std::chrono::milliseconds newer_than,
                                                            std::chrono::milliseconds timeout) {
  const auto good = [&, since = Clock::now() - newer_than] { return peers_at_ > since; };
  send_soon(encode_frame(Frame::ask, ""));
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return good() || closed_; });
  if (!good()) return {};
  return peers_;
}

void TcpStoreClient::on_abort(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) {
      on_abort_ = std::move(callback);
      return;
    }
  }
  callback();
}

void TcpStoreClient::on_tick(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  on_tick_ = std::move(callback);
}

bool peers_alive(const std::vector<PeerState>& peers, int rank) {
  for (std::size_t r = 0; r < peers.size(); ++r)
    if (static_cast<int>(r) != rank && peers[r].silent >= kSilentMs) return false;
  return true;
}

PeerReport report_peers(const std::vector<PeerState>& peers, int rank, std::uint64_t call, int awaited,
                        const RunRanks& run_ranks) {
  const int size = static_cast<int>(peers.size());
  const auto calls = [&](int r) { return r == rank ? call : peers[static_cast<std::size_t>(r)].calls; };
  const auto silent = [&](int r) {
    return r != rank && peers[static_cast<std::size_t>(r)].silent >= kSilentMs;
  };
  PeerReport report;
  // Behind before level, silent before heard, then the lowest number.
  const auto worse = [&](int a, int b) {
    if ((calls(a) < call) != (calls(b) < call)) return calls(a) < call;
    if (silent(a) != silent(b)) return silent(a);
    return calls(a) < calls(b);
  };
  for (int r = 0; r < size; ++r)
    if (r != rank && (report.awaited < 0 || worse(r, report.awaited))) report.awaited = r;
  if (report.awaited < 0 || (calls(report.awaited) >= call && !silent(report.awaited)))
    report.awaited = awaited;

  constexpr int most = 8;
  int parts = 0;
  for (int first = 0; first < size;) {
    int last = first;
    while (run_ranks.empty() && !silent(first) && last + 1 < size && !silent(last + 1) &&
           calls(last + 1) == calls(first))
      ++last;
    if (++parts > most) {
      report.calls += ", ...";
      break;
    }
    report.calls +=
        fmt::format("{}{} #{}", report.calls.empty() ? "" : ", ",
                    first == last ? rank_name(run_ranks, first) : fmt::format("ranks {} to {}", first, last),
                    calls(first));
    if (silent(first))
      report.calls +=
          fmt::format(" (silent for {:.1f} s)", peers[static_cast<std::size_t>(first)].silent * 1e-3);
    first = last + 1;
  }
  return report;
}

}  // namespace topknot
