#pragma once
// The rendezvous of the processes of one run: a small key-value store over TCP at dist.master, and the place
// where the first error of the run is kept. Rank 0 serves it (the launcher does for processes it spawned
// itself).
//
// Every rank keeps one connection for the whole run. When a rank aborts, or its connection closes without a
// shutdown (its process died), the server pushes the reason to all others at once; only the first reason
// counts.
//
// A connection is a rank's once it has said a rank of this run that has not come yet, the run's size and its
// token. The server refuses any other with a message that says why, and closes connections that say nothing
// for a while: none of them disturbs the run. Nothing is encrypted. dist/rendezvous/socket.h has the
// messages.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dist/rendezvous/socket.h"

namespace topknot {

class TcpStoreServer {
 public:
  // Listens at once (UserError when the port cannot be had; port 0 picks a free one) and serves from its own
  // thread. Ranks that have not come within timeout_s are an error, sent to all others.
  TcpStoreServer(const std::string& host, int port, int size, double timeout_s, const std::string& token = "",
                 const RunRanks& run_ranks = {});
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const;
  // Publishes a reason from outside; the first one stays.
  void abort(const std::string& reason);
  // "" while nothing went wrong.
  std::string first_reason() const;
  // Whether a rank itself gave the first reason, or ranks did not come; false if the server noticed a lost
  // connection, of which the end of its process says more.
  bool reason_by_rank() const;
  // The rank that gave the first reason or whose connection was lost; -1: none in particular.
  int first_reason_rank() const;
  // Ranks that have not come so far.
  std::vector<int> missing() const;
  // The one of `ranks` that has been silent for kFrozenSeconds; -1: none. `awaited`: only if another rank has started a
  // collective that it has not, or if it has been silent for five times as long. Ranks that left, or whose connection has
  // closed, are not silent. Time in which this process did not run either does not count.
  int frozen(const std::vector<int>& ranks, bool awaited) const;
  static constexpr double kFrozenSeconds = 2.5;

  // A server whose clients come and go while the run goes on: members. It waits for none, welcomes each at once, and the
  // loss of one is no reason for the others to end but an Event; its rank may come again.
  struct Members {};
  TcpStoreServer(const std::string& host, int port, int size, const std::string& token, Members);
  struct Event {
    enum Kind { came, said, left, lost } kind;
    int rank;
    std::string text = {};  // said: key \0 value; left: the client's last words
  };
  std::optional<Event> next_event();
  // Sends a key's value to this rank's client; rank -1: to all, and to those that come later.
  void tell(int rank, const std::string& key, const std::string& value);
  // Tells the client why, and closes its connection: it is lost.
  void dismiss(int rank, const std::string& reason);

 private:
  TcpStoreServer(const std::string& host, int port, int size, double timeout_s, const std::string& token,
                 const RunRanks& run_ranks, bool members);
  struct State;
  std::unique_ptr<State> state_;
};

class TcpStoreClient {
 public:
  // Connects, and waits until all `size` ranks have come: timeout_s each. Throws CollectiveError, UserError
  // if the server refuses this rank, and Interrupted. `size` is negative for a server of members.
  TcpStoreClient(const std::string& host, int port, int rank, int size, double timeout_s,
                 const std::string& token = "", const RunRanks& run_ranks = {},
                 const MeetingPatience& meeting = {});
  // Announces the shutdown, unless the group has failed, and waits briefly for the others' announcements.
  ~TcpStoreClient();
  TcpStoreClient(const TcpStoreClient&) = delete;
  TcpStoreClient& operator=(const TcpStoreClient&) = delete;

  // A numeric address under which the other ranks can reach this process, as the connections to the master
  // show it.
  const std::string& address() const { return address_; }
  const RunRanks& run_ranks() const { return run_ranks_; }

  void set(const std::string& key, const std::string& value);
  // Waits for the key. Throws CollectiveError when the patience ends or with the first reason of an abort,
  // Interrupted if that is a stop signal's or where one comes and nothing happens. `rank`: whose key it is,
  // for the message.
  std::string get(const std::string& key, Patience& patience, int rank = -1);
  std::string get(const std::string& key, Patience&& patience, int rank = -1) {
    return get(key, patience, rank);
  }

  // After a stop signal, that is what ends the others.
  void abort(const std::string& reason) noexcept;
  // The first reason, waiting for it a while; "" when none came.
  std::string first_reason(std::chrono::milliseconds timeout);
  // Its signal, or 0.
  int first_signal();
  // The value of a key if it has come, else "".
  std::string known(const std::string& key);
  // What the destructor tells a server of members.
  void set_last_words(const std::string& text) { last_words_ = text; }
  // Calls `callback` once, from another thread, when a reason arrives (or here, when one is there already).
  void on_abort(std::function<void()> callback);

  // Collectives that this rank has started, for the other ranks to see. Costs nothing: the next beat sends
  // it.
  void count_calls(std::uint64_t calls) { calls_ = calls; }
  // Every rank's state as the server knows it. Returns an answer that came within `newer_than`, else waits
  // for one; nothing if none comes in time. With a timeout of 0 it asks and returns: the answer serves a
  // later call.
  std::optional<std::vector<PeerState>> peers(std::chrono::milliseconds newer_than,
                                              std::chrono::milliseconds timeout);
  // Calls `callback` a few times per second from another thread.
  void on_tick(std::function<void()> callback);

 private:
  std::string server() const { return rank_name(run_ranks_, 0) + "'s address " + where_; }
  void wait_for_all(const std::string& host, int port, const std::string& hello, double timeout_s,
                    const MeetingPatience& meeting, std::string& buffer);
  void beat_if_due();
  void read_loop(std::string buffer);
  void tick();
  void handle(Frame type, std::string payload);
  void learn_reason(const std::string& reason, int signal);
  void send_soon(const std::string& frame);

  std::string where_;
  int rank_;
  const RunRanks run_ranks_;
  std::string address_, last_words_;
  Fd fd_, wake_;
  Patience next_beat_;  // over at once
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<bool> aborted_{false};  // by this rank
  std::mutex write_mutex_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::string welcome_, reason_;
  int signal_ = 0;  // of reason_
  bool leaving_ = false, all_left_ = false, closed_ = false;
  std::vector<PeerState> peers_;
  Clock::time_point peers_at_;
  std::function<void()> on_abort_, on_tick_;
  std::thread reader_;
};

// Which rank the others wait for, by what the store knows of each: the collectives that it has started and
// how long it has been silent. A rank that waits sees only its own connections, and may wait for one that
// waits itself.

// A rank is silent if two beats did not come.
inline constexpr std::uint32_t kSilentMs = 1200;

// Whether no rank but `rank` is silent.
bool peers_alive(const std::vector<PeerState>& peers, int rank);

struct PeerReport {
  int awaited = -1;   // the rank at fault; -1: not known
  std::string calls;  // "rank 0 #811 (silent for 9.8 s), ranks 1 to 3 #812"
};
// For `rank`, whose call number is `call` and which sees itself wait for `awaited` (-1: for none in
// particular). At fault is, among the ranks that have not started the call, else among all others, a silent
// one; else the one with the lowest number; else `awaited`.
PeerReport report_peers(const std::vector<PeerState>& peers, int rank, std::uint64_t call, int awaited,
                        const RunRanks& run_ranks = {});

}  // namespace topknot
