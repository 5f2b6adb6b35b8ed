#include "dist/gloo_communicator.h"

#include <cstdio>
#include <mutex>
#include <optional>

#include "dist/gloo_collectives.h"
#include "dist/gloo_mesh.h"
#include "dist/tcp_store.h"

namespace topknot {
namespace {

using Operation = GlooOperation;

std::string plural(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what;
}

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(const GlooOptions& options) : options_(options) {
    if (size() == 1) return;
    if (options_.serve_store) server_.emplace(options_.host, options_.port, size(), options_.timeout_s);
    const int port = server_ ? server_->port() : options_.port;
    store_.emplace(server_ ? "127.0.0.1" : options_.host, port, rank(), size(), options_.timeout_s);
    try {
      connect();
    } catch (const UserError& error) {
      store_->abort(me() + error.what());
      disconnect();
      throw;
    } catch (const std::exception& error) {
      const std::string reason = store_->first_reason(std::chrono::milliseconds(1000));
      const std::string text = me() + "could not connect to all ranks: " + error.what();
      if (reason.empty()) store_->abort(text);
      disconnect();
      throw CollectiveError(reason.empty() ? text : text + "\nfirst error: " + reason);
    }
  }

  ~GlooCommunicator() override { disconnect(); }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  std::string backend() const override { return "gloo"; }
  bool overlaps() const override { return true; }

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    all.resize(size());
    all[rank()].assign(mine.begin(), mine.end());
    run(Operation::gather, mine.size(), [&] { collectives_->gather(mine, all); });
  }

  void all_reduce(std::span<float> data, SumOrder order) override {
    run(Operation::reduce, data.size_bytes(), [&] { collectives_->all_reduce(data, order); });
  }

  void all_reduce(std::span<double> data) override {
    run(Operation::reduce_double, data.size_bytes(), [&] { collectives_->all_reduce(data); });
  }

  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run(Operation::broadcast, data.size(), [&] { collectives_->broadcast(data, root); });
  }

  void all_to_all(std::span<const std::vector<std::byte>>, std::vector<std::vector<std::byte>>&) override {
    throw Error("all_to_all is not there yet");
  }

  void send_receive(int, std::span<const std::byte>, int, std::vector<std::byte>&) override {
    throw Error("send_receive is not there yet");
  }

  std::unique_ptr<Communicator> split(int) override { throw Error("split is not there yet"); }

  void barrier() override {
    run(Operation::barrier, 0, [&] { collectives_->barrier(); });
  }

  void abort(const std::string& reason) noexcept override {
    try {
      const std::string text = reason.rfind("rank ", 0) == 0 ? reason : me() + reason;
      {
        const std::lock_guard lock(mutex_);
        if (own_reason_.empty()) own_reason_ = text;
      }
      if (store_) store_->abort(text);
      if (mesh_) mesh_->fail();
    } catch (...) {
      // Out of memory: this process ends soon, and its connections with it.
    }
  }

 private:
  std::string me() const { return "rank " + std::to_string(rank()) + ": "; }

  void disconnect() {
    collectives_.reset();
    store_.reset();  // says goodbye; its thread calls into the mesh no more
    mesh_.reset();
  }

  void connect() {
    mesh_.emplace(*store_, rank(), size(), options_.interface, options_.timeout_s);
    store_->on_abort([this] { mesh_->fail(); });
    mesh_->connect(*store_, deadline_in(options_.timeout_s));
    collectives_.emplace(*mesh_, rank(), size(), options_.check_calls);
  }

  template <class Body>
  void run(Operation operation, std::size_t bytes, const Body& body) {
    ++sequence_;
    throw_if_aborted(operation);
    if (size() == 1) return;
    const Deadline deadline = deadline_in(options_.timeout_s);
    collectives_->begin({operation, sequence_, deadline});
    try {
      body();
    } catch (const std::exception& error) {
      give_up(operation, bytes, deadline, error);
    }
  }

  std::string call_text(Operation operation) const {
    return std::string(operation_name(operation)) + " #" + std::to_string(sequence_);
  }

  void throw_if_aborted(Operation operation) {
    const std::lock_guard lock(mutex_);
    if (!own_reason_.empty())
      throw CollectiveError(me() + call_text(operation) + " after this rank gave up: " + own_reason_);
  }

  [[noreturn]] void give_up(Operation operation, std::size_t bytes, Deadline deadline,
                            const std::exception& error) {
    const bool mismatch = dynamic_cast<const GlooMismatch*>(&error) != nullptr;
    const bool late = Clock::now() + std::chrono::milliseconds(5) >= deadline;
    std::string text = me() + call_text(operation);
    const int awaited = collectives_->waiting_for();
    const std::string peer = awaited < 0 ? "a peer" : "rank " + std::to_string(awaited);
    if (mismatch) {
      text = error.what();
    } else if (late) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", options_.timeout_s);
      text += " (" + plural(bytes, "bytes") + ") gave up after dist.timeout_s (" + seconds + " s): " + peer +
              " did not come";
    } else {
      text += " (" + plural(bytes, "bytes") + ") failed while waiting for " + peer + ": " + error.what();
    }
    // The cause is known to the store first or soon, unless it is this rank's own.
    std::string own;
    {
      const std::lock_guard lock(mutex_);
      own = own_reason_;
    }
    std::string reason = own;
    if (own.empty()) reason = store_->first_reason(std::chrono::milliseconds(mismatch || late ? 20 : 1000));
    if (reason.empty()) store_->abort(text);
    mesh_->fail();
    {
      const std::lock_guard lock(mutex_);
      if (own_reason_.empty()) own_reason_ = reason.empty() ? text : reason;
    }
    throw CollectiveError(reason.empty() || reason == text ? text : text + "\nfirst error: " + reason);
  }

  GlooOptions options_;
  std::optional<TcpStoreServer> server_;
  std::optional<TcpStoreClient> store_;
  std::optional<GlooMesh> mesh_;
  std::optional<GlooCollectives> collectives_;  // where there are other ranks
  std::uint64_t sequence_ = 0;
  std::mutex mutex_;
  std::string own_reason_;
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const GlooOptions& options) {
  TOPKNOT_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
                "a rank outside of its group");
  return std::make_unique<GlooCommunicator>(options);
}

}  // namespace topknot
