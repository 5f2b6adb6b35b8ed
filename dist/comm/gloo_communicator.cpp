// The `gloo` backend: ranks are processes (or, in tests, threads) that talk TCP over Gloo's transport.
//
// - all_gather: the first 4 kB of each block straight to every other rank, the rest around the ring.
// - all_reduce in rank order: each rank receives its slice from every rank, adds in rank order, sends the sum
//   to all. If a rank receives up to 8,192 floats that way: all-gather and add. Bit-identical with the
//   threads backend.
// - all_reduce, SumOrder::library: a ring (reduce-scatter, then all-gather, in segments of 1 MB); small ones
//   as above.
// - all_to_all and send_receive: straight from rank to rank. With check_calls every send_receive first
//   compares who sends to whom; without, only the two that talk exchange messages.
// - split: the first rank of a color serves a store of its own, at a free port of the address under which the
//   others reach it; all its members connect anew.
//
// A failed call closes this rank's connections, so that the peers' calls end too; the message carries the
// first error of the run, as the rendezvous store knows it. After a failure every call throws. abort() may
// come from any thread. SIGPIPE is ignored from the first connection on, unless the program handles it.

#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>

#include "dist/comm/communicator.h"
#include "dist/comm/gloo.h"
#include "dist/rendezvous/tcp_store.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

using Operation = GlooOperation;

// A communicator's live splits, which end when it does. Outlives it if a split does.
class Splits {
 public:
  void add(Communicator* split) {
    const std::lock_guard lock(mutex_);
    live_.insert(split);
    if (!reason_.empty()) split->abort(reason_);
  }
  void remove(Communicator* split) {
    const std::lock_guard lock(mutex_);
    live_.erase(split);
  }
  // `signal`: of the stop that is the reason, or 0.
  void abort(const std::string& reason, int signal) {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason.empty() ? "a rank gave up" : reason;
    signal_ = signal;
    changed_.notify_all();
    for (Communicator* split : live_) split->abort(reason_);
  }
  // "" when none comes in time.
  std::string first_reason(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return !reason_.empty(); });
    return reason_;
  }
  int first_signal() {
    const std::lock_guard lock(mutex_);
    return signal_;
  }
  // The run's silent ranks, as the communicator that was split knows them (`look`, while it lives); "": none.
  void look_by(std::function<std::string()> look) {
    const std::lock_guard lock(look_mutex_);
    look_ = std::move(look);
  }
  std::string silent_ranks() {
    const std::lock_guard lock(look_mutex_);
    return look_ ? look_() : "";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Communicator*> live_;
  std::mutex look_mutex_;  // held while it looks, so that the communicator stays
  std::function<std::string()> look_;
  std::string reason_;
  int signal_ = 0;
};

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(const JoinOptions& options)
      : Communicator({options.rank, options.size, "gloo", true, "", options.run_ranks}), options_(options) {
    if (options_.serve_store && size() > 1)
      server_ = std::make_unique<TcpStoreServer>(options_.host, options_.port, size(), options_.timeout_s,
                                                 options_.token);
    if (server_)
      join(is_ipv6(options_.host) ? "::1" : "127.0.0.1", server_->port());
    else
      join(options_.host, options_.port);
  }

  // A split; `server` on its first rank.
  GlooCommunicator(const JoinOptions& options, std::unique_ptr<TcpStoreServer> server,
                   std::shared_ptr<Splits> siblings)
      : Communicator({options.rank, options.size, "gloo", true, "", options.run_ranks}),
        options_(options),
        server_(std::move(server)) {
    join(options_.host, options_.port);
    siblings_ = std::move(siblings);
    siblings_->add(this);
  }

  ~GlooCommunicator() override {
    if (siblings_) siblings_->remove(this);
    disconnect();
  }

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    gather_as(Operation::gather, mine, all);
  }

  void all_reduce(std::span<float> data, SumOrder order) override {
    run(Operation::reduce, data.size_bytes(), [&] { collectives_->all_reduce(data, order); });
  }

  void all_reduce(std::span<BFloat16> data, SumOrder order) override {
    run(Operation::reduce, data.size_bytes(), [&] { collectives_->all_reduce(data, order); });
  }

  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run(Operation::broadcast, data.size(), [&] { collectives_->broadcast(data, root); });
  }

  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override {
    TOPKNOT_CHECK(static_cast<int>(mine.size()) == size(), "all_to_all with one block per rank");
    theirs.resize(size());
    theirs[rank()] = mine[rank()];
    std::size_t bytes = 0;
    for (const auto& block : mine) bytes += block.size();
    run(Operation::all_to_all, bytes, [&] { collectives_->all_to_all(mine, theirs); });
  }

  void send_receive(int to, std::span<const std::byte> mine, int from,
                    std::vector<std::byte>& theirs) override {
    TOPKNOT_CHECK(to >= -1 && to < size() && to != rank() && from >= -1 && from < size() && from != rank(),
                  "send_receive with a rank that does not exist, or with itself");
    theirs.clear();
    run(Operation::send_receive, mine.size(), [&] { collectives_->send_receive(to, mine, from, theirs); });
  }

  std::unique_ptr<Communicator> split(int color) override {
    std::vector<std::vector<std::byte>> all;
    gather_as(Operation::split, std::as_bytes(std::span(&color, 1)), all);
    std::vector<int> members;
    JoinOptions options = options_;
    options.serve_store = options.launcher_serves = false;
    options.run_ranks.clear();
    for (int r = 0; r < size(); ++r) {
      int theirs;
      if (all[r].size() != sizeof theirs) throw CollectiveError(me() + "split: a damaged block");
      std::memcpy(&theirs, all[r].data(), sizeof theirs);
      if (r == rank()) options.rank = static_cast<int>(members.size());
      if (theirs != color) continue;
      members.push_back(r);
      options.run_ranks.push_back(run_rank(run_ranks(), r));
    }
    options.size = static_cast<int>(members.size());

    // The first member serves the rendezvous, under the address that reaches this process.
    std::unique_ptr<TcpStoreServer> server;
    std::string place;
    if (options.rank == 0 && options.size > 1) {
      server = std::make_unique<TcpStoreServer>(store_->address(), 0, options.size, options_.timeout_s,
                                                options_.token, options.run_ranks);
      place = fmt::format("{} {}", server->port(), store_->address());
    }
    gather_as(Operation::split, std::as_bytes(std::span(place)), all);
    if (options.size > 1) {
      const auto& bytes = all[static_cast<std::size_t>(members[0])];
      const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      options.port = std::atoi(text.c_str());
      options.host = text.substr(text.find(' ') + 1);
    }
    try {
      return std::make_unique<GlooCommunicator>(options, std::move(server), splits_);
    } catch (const CollectiveError& error) {
      const std::string reason = splits_->first_reason({});
      throw CollectiveError(me() + call_text(Operation::split) + " could not connect its members: " +
                            error.what() + (reason.empty() ? "" : "\nfirst error: " + reason));
    }
  }

  void barrier() override {
    run(Operation::barrier, 0, [&] { collectives_->barrier(); });
  }

  void abort(const std::string& reason) noexcept override {
    try {
      const std::string text = published(reason);
      {
        const std::lock_guard lock(mutex_);
        if (own_reason_.empty()) own_reason_ = text;
      }
      if (store_) store_->abort(text);
      if (mesh_) mesh_->fail();
      splits_->abort(text, stop_signal());
    } catch (...) {
      // Out of memory: this process ends soon, which closes its connections.
    }
  }

  std::string first_error() override { return splits_->first_reason({}); }
  bool peers_alive() override { return !store_ || heard_of_all(*store_); }

 private:
  std::string me() const { return rank_name(rank()) + ": "; }

  void gather_as(Operation operation, std::span<const std::byte> mine,
                 std::vector<std::vector<std::byte>>& all) {
    all.resize(size());
    all[rank()].assign(mine.begin(), mine.end());
    run(operation, mine.size(), [&] { collectives_->gather(mine, all); });
  }

  void disconnect() {
    splits_->look_by({});
    collectives_.reset();
    store_.reset();  // announces its shutdown; its thread calls into the mesh no more
    mesh_.reset();
  }

  void join(const std::string& host, int port) {
    if (size() == 1) return;
    store_.emplace(host, port, rank(), size(), options_.timeout_s, options_.token, options_.run_ranks,
                   options_.meeting);
    try {
      connect();
    } catch (const UserError& error) {
      store_->abort(me() + error.what());
      disconnect();
      throw;
    } catch (const std::exception& error) {
      const std::string reason = store_->first_reason(std::chrono::milliseconds(1000));
      std::string cause = explain(error);
      if (reason.empty() && !interrupted_ && server_is_silent()) cause = silent_server() + " (" + cause + ")";
      const std::string text =
          interrupted_
              ? fmt::format("{}stopped by {} while connecting to the other ranks", me(),
                            signal_name(stop_signal()))
              : fmt::format(
                    "{}could not connect to all ranks{}: {}", me(),
                    expired_ ? fmt::format(" within dist.timeout_s ({:g} s)", options_.timeout_s) : "",
                    cause);
      if (reason.empty()) store_->abort(text);
      const int signal = stop_signal() ? stop_signal() : store_->first_signal();
      disconnect();
      throw_error(reason.empty() ? text : text + "\nfirst error: " + reason, signal);
    }
  }

  void connect() {
    mesh_.emplace(*store_, rank(), size(), options_.interface);
    store_->on_abort([this, store = &*store_] {
      mesh_->fail();
      splits_->abort(store->first_reason({}), store->first_signal());
    });
    store_->on_tick([this, store = &*store_] { watch(*store); });
    const Waiting waiting(waits_, kConnecting);
    mesh_->connect(*store_, Patience(options_.timeout_s));
    collectives_.emplace(*mesh_, rank(), size(), options_.check_calls, options_.run_ranks);
    splits_->look_by([this] { return silent_ranks(); });
  }

  void run(Operation operation, std::size_t bytes, const auto& body) {
    ++sequence_;
    throw_if_aborted(operation);
    if (size() == 1) return;
    store_->count_calls(sequence_);
    const Waiting waiting(waits_, sequence_);
    collectives_->begin({operation, sequence_});
    try {
      body();
    } catch (const std::exception& error) {
      give_up(operation, bytes, error);
    }
  }

  bool heard_of_all(TcpStoreClient& store) const {
    const auto peers = store.peers(std::chrono::seconds(1), {});
    return peers && topknot::peers_alive(*peers, rank());
  }

  // On the store's thread, a few times per second: ends calls at their deadline, or after a stop signal.
  void watch(TcpStoreClient& store) {
    const std::uint64_t call = waits_;
    if (call != watched_) {
      watched_ = call;
      patience_ = Patience(options_.timeout_s);
      after_signal_ = {};
    }
    if (call == 0) return;
    const bool over = patience_.over();  // looked at in every tick
    if (stop_signal() != 0 && after_signal_.ended(mesh_->progress(), heard_of_all(store)))
      interrupted_ = true;
    else if (over)
      expired_ = true;
    else
      return;
    mesh_->fail();
  }

  std::string call_text(Operation operation) const {
    return fmt::format("{} #{}", operation_name(operation), sequence_);
  }

  void throw_if_aborted(Operation operation) {
    const std::lock_guard lock(mutex_);
    if (!own_reason_.empty())
      throw CollectiveError(me() + call_text(operation) + " after this rank gave up: " + own_reason_);
  }

  [[noreturn]] void give_up(Operation operation, std::size_t bytes, const std::exception& error) {
    const bool mismatch = dynamic_cast<const GlooMismatch*>(&error) != nullptr;
    const bool stopped = interrupted_;
    const bool late = stopped || expired_;
    std::string text = fmt::format("{}{} ({} bytes{})", me(), call_text(operation), bytes, place());
    int awaited = collectives_->waiting_for();
    // A rank of a split may wait for one that waits for a rank of another split.
    const std::string elsewhere = late && !mismatch && siblings_ ? siblings_->silent_ranks() : "";
    const std::string known = mismatch || !late || !elsewhere.empty() ? "" : report_calls(awaited);
    const std::string peer = awaited < 0 ? "a peer" : rank_name(awaited);
    if (mismatch)
      text = error.what();
    else if (stopped)
      text += fmt::format(" stopped by {} while waiting for {}{}", signal_name(stop_signal()), peer, known);
    else if (late)
      text += fmt::format(" gave up after dist.timeout_s ({:g} s): {}", options_.timeout_s,
                          elsewhere.empty() ? peer + " did not come" + known : elsewhere);
    else
      text += fmt::format(" failed while waiting for {}: {}", peer, error.what());
    // The cause is known to the store first or soon, unless it is this rank's own.
    std::string own;
    {
      const std::lock_guard lock(mutex_);
      own = own_reason_;
    }
    std::string reason = own;
    // The reason from the communicator that was split numbers the ranks as the user does.
    if (own.empty() && siblings_)
      reason = siblings_->first_reason(std::chrono::milliseconds(mismatch || late ? 0 : 500));
    if (reason.empty())
      reason = store_->first_reason(std::chrono::milliseconds(mismatch || late ? 20 : 1000));
    if (reason.empty() && !mismatch && !late) {
      std::string cause = siblings_ ? siblings_->silent_ranks() : "";
      if (cause.empty() && server_is_silent()) cause = silent_server();
      if (!cause.empty())
        text = fmt::format(
            "{}{} ({} bytes{}) failed: {}, and a connection to a rank that gave up on it has ended: {}", me(),
            call_text(operation), bytes, place(), cause, error.what());
    }
    if (reason.empty()) store_->abort(text);
    mesh_->fail();
    {
      const std::lock_guard lock(mutex_);
      if (own_reason_.empty()) own_reason_ = reason.empty() ? text : reason;
    }
    // Whatever fails after a stop signal, of this rank or of the one that failed first, ends because of it.
    int signal = stop_signal();
    if (signal == 0) signal = store_->first_signal();
    if (signal == 0 && siblings_) signal = siblings_->first_signal();
    splits_->abort(reason.empty() ? text : reason, signal);
    throw_error(reason.empty() || reason == text ? text : text + "\nfirst error: " + reason, signal);
  }

  [[noreturn]] static void throw_error(const std::string& text, int signal) {
    if (signal != 0) throw Interrupted(text, signal);
    throw CollectiveError(text);
  }

  // If a rank whose network is cut serves the rendezvous, no rank learns there why another one has ended.
  bool server_is_silent() { return !ask_for_peers() && may_be_silent(); }
  // Whether a server that did not answer is of another rank and has not closed.
  bool may_be_silent() {
    return rank() != 0 && !options_.launcher_serves && store_->first_reason({}).empty();
  }
  std::string silent_server() const {
    return rank_name(0) + ", which serves the rendezvous, does not answer";
  }
  std::optional<std::vector<PeerState>> ask_for_peers() {
    return store_->peers({}, std::chrono::milliseconds(2000));
  }

  // Which rank is silent, in words; "" if none is known to be.
  std::string silent_ranks() {
    const auto peers = ask_for_peers();
    if (!peers) return may_be_silent() ? silent_server() : "";
    for (int r = 0; r < size(); ++r) {
      const std::uint32_t silent = (*peers)[static_cast<std::size_t>(r)].silent;
      if (r != rank() && silent >= kSilentMs)
        return fmt::format("{} has been silent for {:.1f} s", rank_name(r), silent * 1e-3);
    }
    return "";
  }

  // How far each rank has come, as a message goes on; `awaited` becomes the rank at fault.
  std::string report_calls(int& awaited) {
    // On a busy machine an answer takes its time; after a stop signal there is none to lose.
    const std::chrono::milliseconds patience(stop_signal() == 0 ? 2000 : 300);
    if (const auto peers = store_->peers({}, patience)) {
      const PeerReport report = report_peers(*peers, rank(), sequence_, awaited, run_ranks());
      awaited = report.awaited;
      return "; calls started: " + report.calls;
    }
    if (!store_->first_reason({}).empty()) return "";  // it has closed
    if (options_.launcher_serves)
      return "; the launcher, which serves the rendezvous, does not answer either";
    if (rank() == 0) return "";
    awaited = 0;
    return "; " + silent_server() + " there either";
  }

  JoinOptions options_;
  std::unique_ptr<TcpStoreServer> server_;
  const std::shared_ptr<Splits> splits_ = std::make_shared<Splits>();
  std::shared_ptr<Splits> siblings_;  // the splits of the one that was split
  std::optional<TcpStoreClient> store_;
  std::optional<GlooMesh> mesh_;
  std::optional<GlooCollectives> collectives_;  // if there are other ranks
  std::uint64_t sequence_ = 0;
  // Marks that this rank waits for others in the call of that number.
  struct Waiting {
    Waiting(std::atomic<std::uint64_t>& marked, std::uint64_t call) : mark(marked) { mark = call; }
    ~Waiting() { mark = 0; }
    std::atomic<std::uint64_t>& mark;
  };
  static constexpr std::uint64_t kConnecting = ~std::uint64_t{0};
  std::atomic<std::uint64_t> waits_{0};   // the call, kConnecting, or 0
  std::atomic<bool> interrupted_{false};  // the wait was ended because of a stop signal
  std::atomic<bool> expired_{false};      // because of dist.timeout_s
  // The store's thread's own.
  std::uint64_t watched_ = 0;  // what it saw last in waits_
  Patience patience_;
  StopGracePeriod after_signal_;
  std::mutex mutex_;
  std::string own_reason_;
};

const bool gloo_communicator_registered =
    backends().add("gloo", "ranks are processes that talk by TCP; needs a network between the hosts",
                   {.needs = "a network between the hosts", .join = make_gloo_communicator});

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const JoinOptions& options) {
  TOPKNOT_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
                "a rank outside of its group");
  return std::make_unique<GlooCommunicator>(options);
}

}  // namespace topknot
