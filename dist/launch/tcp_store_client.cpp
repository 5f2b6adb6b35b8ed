#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "dist/comm/communicator.h"
#include "dist/launch/tcp_store.h"

namespace topknot {

TcpStoreClient::TcpStoreClient(const std::string& host, int port, int rank, int size, double timeout_s)
    : where_(host + ":" + std::to_string(port)), rank_(rank) {
  const Deadline deadline = deadline_in(timeout_s);
  try {
    fd_ = connect_to(host, port, deadline);
  } catch (const CollectiveError& error) {
    throw CollectiveError("rank " + std::to_string(rank) + ": " + error.what());
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
    throw CollectiveError("rank " + std::to_string(rank) + ": " + problem);
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
        write_all(fd_.get(), encode_frame(Frame::bye, ""), Clock::now() + std::chrono::milliseconds(500));
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
    } else if (type == Frame::bye_all) {
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
    // Out of memory, or a mutex that failed: the closing connections will tell the peers.
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
