#pragma once
// The rendezvous of the processes of one run: a small key-value store over TCP at dist.master, and the place
// where the first error of the run is kept. Rank 0 serves it (the launcher does for processes it spawned
// itself).
//
// Every rank keeps one connection for the whole run. When a rank aborts, or its connection closes without a
// shutdown (its process died), the server pushes the reason to all others at once; only the first reason
// counts.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/launch/socket.h"

namespace topknot {

class TcpStoreServer {
 public:
  // Listens at once (UserError when the port cannot be had; port 0 picks a free one) and serves from its own
  // thread. Ranks that have not come within timeout_s are an error, sent to all others.
  TcpStoreServer(const std::string& host, int port, int size, double timeout_s);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const;
  // Publishes a reason from outside; the first one stays.
  void abort(const std::string& reason);
  // "" while nothing went wrong.
  std::string first_reason() const;
  // Whether a rank itself gave the first reason; false where the server noticed a lost connection.
  bool reason_by_rank() const;
  // The rank that gave the first reason or whose connection was lost; -1: none in particular.
  int first_reason_rank() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class TcpStoreClient {
 public:
  // Connects, and waits until all `size` ranks have come: timeout_s each. Throws CollectiveError.
  TcpStoreClient(const std::string& host, int port, int rank, int size, double timeout_s);
  // Announces the shutdown, unless the group has failed, and waits briefly for the others' announcements.
  ~TcpStoreClient();
  TcpStoreClient(const TcpStoreClient&) = delete;
  TcpStoreClient& operator=(const TcpStoreClient&) = delete;

  // A numeric address under which the other ranks can reach this process, as the connections to the master
  // show it.
  const std::string& address() const { return address_; }

  void set(const std::string& key, const std::string& value);
  // Waits for the key. Throws CollectiveError at the deadline or with the first reason of an abort.
  std::string get(const std::string& key, Deadline deadline);

  void abort(const std::string& reason) noexcept;
  // The first reason, waiting for it a while; "" when none came.
  std::string first_reason(std::chrono::milliseconds timeout);
  // Calls `callback` once, from another thread, when a reason arrives (or here, when one is there already).
  void on_abort(std::function<void()> callback);

 private:
  void read_loop();
  void handle(Frame type, std::string payload);
  void learn_reason(const std::string& reason);

  std::string where_;
  int rank_;
  std::string address_;
  Fd fd_, wake_;
  std::mutex write_mutex_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::string welcome_, reason_;
  bool welcomed_ = false, leaving_ = false, all_left_ = false, closed_ = false;
  std::function<void()> callback_;
  std::thread reader_;
};

}  // namespace topknot
