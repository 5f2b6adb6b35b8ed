#include "dist/gloo_communicator.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>

#include "dist/gloo_mesh.h"
#include "dist/ordered_sum.h"
#include "dist/tcp_store.h"

namespace topknot {
namespace {

constexpr std::size_t eager_bytes = 4096;  // header and start of a block, sent before sizes are known
constexpr std::size_t small_count = 8192;  // elements summed after a plain all-gather
constexpr std::size_t ring_segment = (1 << 20) / 4;  // floats
enum Slot : std::uint64_t { slot_eager = 1, slot_block, slot_slice, slot_sum, slot_ring, slot_broadcast };

struct Header {
  std::uint64_t operation, sequence;
  std::uint64_t size;   // bytes of the call, as this rank sees it
  std::uint64_t block;  // bytes of the block that this message starts
};

std::string plural(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what;
}

const char* operation_name(std::uint64_t operation);
enum Operation : std::uint64_t { op_gather = 1, op_reduce, op_reduce_double, op_broadcast, op_barrier };
const char* operation_name(std::uint64_t operation) {
  switch (operation) {
    case op_gather:
      return "all_gather";
    case op_reduce:
      return "all_reduce";
    case op_reduce_double:
      return "all_reduce of doubles";
    case op_broadcast:
      return "broadcast";
    case op_barrier:
      return "barrier";
    default:
      return "unknown operation";
  }
}

// The ranks disagree about what is called; not a connection's fault.
struct Mismatch : Error {
  using Error::Error;
};

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
    run(op_gather, mine.size(), [&] { gather(op_gather, mine, all); });
  }

  void all_reduce(std::span<float> data, SumOrder order) override {
    run(op_reduce, data.size_bytes(), [&] {
      if (data.size() <= small_count) return gather_and_add(op_reduce, data);
      check_call(op_reduce, data.size_bytes());
      if (order == SumOrder::ranks)
        reduce_in_rank_order(data);
      else
        reduce_on_ring(data);
    });
  }

  void all_reduce(std::span<double> data) override {
    run(op_reduce_double, data.size_bytes(), [&] {
      if (data.size() <= small_count) return gather_and_add(op_reduce_double, data);
      check_call(op_reduce_double, data.size_bytes());
      reduce_in_rank_order(data);
    });
  }

  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    run(op_broadcast, data.size(), [&] {
      check_call(op_broadcast, data.size());
      broadcast_tree(data, root);
    });
  }

  void barrier() override {
    run(op_barrier, 0, [&] { gather(op_barrier, {}, scratch_); });
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
  using Buffer = GlooMesh::Buffer;

  std::string me() const { return "rank " + std::to_string(rank()) + ": "; }
  // Starting with its right neighbour, so that the ranks do not all send to rank 0 first.
  int peer(int i) const { return (rank() + i) % size(); }

  void disconnect() {
    eager_in_.clear();
    store_.reset();  // says goodbye; its thread calls into the mesh no more
    mesh_.reset();
  }

  void connect() {
    mesh_.emplace(*store_, rank(), size(), options_.interface, options_.timeout_s);
    store_->on_abort([this] { mesh_->fail(); });
    mesh_->connect(*store_, deadline_in(options_.timeout_s));
    eager_memory_.resize(size());
    eager_in_.resize(size());
    for (int i = 1; i < size(); ++i) {
      const int r = peer(i);
      eager_memory_[r].resize(eager_bytes);
      eager_in_[r] = std::make_unique<Buffer>(*mesh_, eager_memory_[r].data(), eager_bytes);
      eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);
    }
  }

  template <class Body>
  void run(Operation operation, std::size_t bytes, const Body& body) {
    ++sequence_;
    throw_if_aborted(operation);
    if (size() == 1) return;
    deadline_ = deadline_in(options_.timeout_s);
    waiting_for_ = -1;
    try {
      body();
    } catch (const std::exception& error) {
      give_up(operation, bytes, error);
    }
  }

  std::string call_text(std::uint64_t operation) const {
    return std::string(operation_name(operation)) + " #" + std::to_string(sequence_);
  }

  void throw_if_aborted(Operation operation) {
    const std::lock_guard lock(mutex_);
    if (!own_reason_.empty())
      throw CollectiveError(me() + call_text(operation) + " after this rank gave up: " + own_reason_);
  }

  [[noreturn]] void give_up(Operation operation, std::size_t bytes, const std::exception& error) {
    const bool mismatch = dynamic_cast<const Mismatch*>(&error) != nullptr;
    const bool late = Clock::now() + std::chrono::milliseconds(5) >= deadline_;
    std::string text = me() + call_text(operation);
    const std::string peer = waiting_for_ < 0 ? "a peer" : "rank " + std::to_string(waiting_for_);
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

  void check_header(const Header& theirs, const Header& mine, int r, bool same_size) {
    if (theirs.operation == mine.operation && theirs.sequence == mine.sequence &&
        (!same_size || theirs.size == mine.size))
      return;
    const auto text = [](const Header& h) {
      return std::string(operation_name(h.operation)) + " #" + std::to_string(h.sequence) + " of " +
             std::to_string(h.size) + " bytes";
    };
    throw Mismatch("the ranks do not make the same calls: rank " + std::to_string(rank()) + " is in " +
                   text(mine) + ", rank " + std::to_string(r) + " in " + text(theirs));
  }

  // all[r] for every other rank r. `mine` starts in the eager message; what is longer follows at once.
  // With `size_of_call` given, it must be the same on all ranks.
  void gather(Operation operation, std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all,
              std::optional<std::size_t> size_of_call = {}) {
    constexpr std::size_t room = eager_bytes - sizeof(Header);
    const Header header{operation, sequence_, size_of_call.value_or(mine.size()), mine.size()};
    std::byte message[eager_bytes];
    std::memcpy(message, &header, sizeof header);
    const std::size_t head = std::min(room, mine.size());
    std::copy_n(mine.begin(), head, message + sizeof header);
    Buffer out(*mesh_, message, sizeof header + head);
    std::optional<Buffer> rest_out;
    if (mine.size() > room) rest_out.emplace(*mesh_, static_cast<const void*>(mine.data()), mine.size());
    for (int i = 1; i < size(); ++i) out.send(peer(i), slot_eager, 0, sizeof header + head);
    if (rest_out)
      for (int i = 1; i < size(); ++i) rest_out->send(peer(i), slot_block, room, mine.size() - room);

    all.resize(size());
    std::vector<std::unique_ptr<Buffer>> rest_in(size());
    for (int i = 1; i < size(); ++i) {
      const int r = waiting_for_ = peer(size() - i);  // in the order in which they send to this rank
      eager_in_[r]->wait_received(deadline_);
      const std::byte* bytes = eager_memory_[r].data();
      Header theirs;
      std::memcpy(&theirs, bytes, sizeof theirs);
      check_header(theirs, header, r, size_of_call.has_value());
      all[r].resize(theirs.block);
      std::copy_n(bytes + sizeof theirs, std::min<std::size_t>(room, theirs.block), all[r].begin());
      eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);  // for the next call
      if (theirs.block > room) {
        rest_in[r] = std::make_unique<Buffer>(*mesh_, static_cast<void*>(all[r].data()), all[r].size());
        rest_in[r]->receive(r, slot_block, room, theirs.block - room);
      }
    }
    for (int i = 1; i < size(); ++i) {
      waiting_for_ = peer(size() - i);
      if (rest_in[waiting_for_]) rest_in[waiting_for_]->wait_received(deadline_);
    }
    for (int i = 1; i < size(); ++i) {
      waiting_for_ = -1;
      out.wait_sent(deadline_);
      if (rest_out) rest_out->wait_sent(deadline_);
    }
  }

  void check_call(Operation operation, std::size_t bytes) {
    if (!options_.check_calls) return;
    gather(operation, {}, scratch_, bytes);
  }

  template <class T>
  void gather_and_add(Operation operation, std::span<T> data) {
    gather(operation, std::as_bytes(data), scratch_, data.size_bytes());
    std::vector<const T*> sources(size());
    for (int r = 0; r < size(); ++r)
      sources[r] = r == rank() ? data.data() : reinterpret_cast<const T*>(scratch_[r].data());
    ordered_sum<T>(sources, data.data(), data.size());
  }

  template <class T>
  void reduce_in_rank_order(std::span<T> data) {
    const Slice own = slice_of(data.size(), size(), rank());
    std::vector<std::vector<std::byte>>& theirs = scratch_;
    theirs.resize(size());
    std::vector<const T*> sources(size());
    sources[rank()] = data.data() + own.begin;
    {
      std::vector<std::unique_ptr<Buffer>> in(size());
      for (int i = 1; i < size(); ++i) {
        const int r = peer(size() - i);
        theirs[r].resize(own.size() * sizeof(T));
        sources[r] = reinterpret_cast<const T*>(theirs[r].data());
        in[r] = std::make_unique<Buffer>(*mesh_, static_cast<void*>(theirs[r].data()), theirs[r].size());
        in[r]->receive(r, slot_slice, 0, theirs[r].size());
      }
      Buffer out(*mesh_, static_cast<const void*>(data.data()), data.size_bytes());
      for (int i = 1; i < size(); ++i) {
        const Slice slice = slice_of(data.size(), size(), peer(i));
        out.send(peer(i), slot_slice, slice.begin * sizeof(T), slice.size() * sizeof(T));
      }
      for (int i = 1; i < size(); ++i) {
        waiting_for_ = peer(size() - i);
        in[waiting_for_]->wait_received(deadline_);
      }
      for (int i = 1; i < size(); ++i) out.wait_sent(deadline_);
    }
    std::vector<std::unique_ptr<Buffer>> in(size());
    for (int i = 1; i < size(); ++i) {
      const int r = peer(size() - i);
      const Slice slice = slice_of(data.size(), size(), r);
      in[r] = std::make_unique<Buffer>(*mesh_, static_cast<void*>(data.data() + slice.begin),
                                       slice.size() * sizeof(T));
      in[r]->receive(r, slot_sum, 0, slice.size() * sizeof(T));
    }
    ordered_sum<T>(sources, data.data() + own.begin, own.size());
    Buffer out(*mesh_, static_cast<const void*>(data.data() + own.begin), own.size() * sizeof(T));
    for (int i = 1; i < size(); ++i) out.send(peer(i), slot_sum, 0, own.size() * sizeof(T));
    for (int i = 1; i < size(); ++i) {
      waiting_for_ = peer(size() - i);
      in[waiting_for_]->wait_received(deadline_);
    }
    for (int i = 1; i < size(); ++i) out.wait_sent(deadline_);
  }

  // Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. Message m of `messages` belongs to
  // step m / segments; what is received in a step is sent on in the next one, so the segments of a chunk
  // follow each other around the ring. In the first size-1 steps a received segment is added, in the others
  // it is final.
  void reduce_on_ring(std::span<float> data) {
    const int right = peer(1), left = peer(size() - 1);
    const std::size_t chunk = slice_of(data.size(), size(), 0).size();  // the largest
    const std::size_t segments = (chunk + ring_segment - 1) / ring_segment;
    const std::size_t adding = (size() - 1) * segments, messages = 2 * adding;
    // Where message m lies in `data` when this rank receives it; `shift` 1: when it sends it.
    const auto place = [&](std::size_t m, int shift) {
      const int step = static_cast<int>(m / segments);
      const int index = ((rank() - step - 1 + shift) % size() + size()) % size();
      const Slice all = slice_of(data.size(), size(), index);
      const std::size_t begin = std::min(all.end, all.begin + (m % segments) * ring_segment);
      return Slice{begin, std::min(all.end, begin + ring_segment)};
    };
    constexpr std::size_t ahead = 4;  // receives that are posted before they are waited for
    const std::size_t segment = std::min(chunk, ring_segment);
    std::vector<float> arriving(ahead * segment);
    Buffer in_add(*mesh_, static_cast<void*>(arriving.data()), arriving.size() * sizeof(float));
    Buffer in_final(*mesh_, static_cast<void*>(data.data()), data.size_bytes());
    Buffer out(*mesh_, static_cast<const void*>(data.data()), data.size_bytes());
    const auto post = [&](std::size_t m) {
      const Slice to = place(m, 0);
      if (m < adding)
        in_add.receive(left, slot_ring, (m % ahead) * segment * sizeof(float), to.size() * sizeof(float));
      else
        in_final.receive(left, slot_ring, to.begin * sizeof(float), to.size() * sizeof(float));
    };
    const auto send = [&](std::size_t m) {
      const Slice from = place(m, 1);
      out.send(right, slot_ring, from.begin * sizeof(float), from.size() * sizeof(float));
    };
    for (std::size_t m = 0; m < std::min(ahead, messages); ++m) post(m);
    for (std::size_t m = 0; m < segments; ++m) send(m);
    for (std::size_t m = 0; m < messages; ++m) {
      waiting_for_ = left;
      if (m < adding) {
        in_add.wait_received(deadline_);
        const Slice to = place(m, 0);
        const float* source = arriving.data() + (m % ahead) * segment;
        float* target = data.data() + to.begin;
        for (std::size_t i = 0; i < to.size(); ++i) target[i] += source[i];
      } else {
        in_final.wait_received(deadline_);
      }
      if (m + segments < messages) send(m + segments);
      if (m + ahead < messages) post(m + ahead);
    }
    waiting_for_ = right;
    for (std::size_t m = 0; m < messages; ++m) out.wait_sent(deadline_);
  }

  void broadcast_tree(std::span<std::byte> data, int root) {
    if (data.empty()) return;
    const int place = (rank() - root + size()) % size();  // the root is 0
    int step = 1;
    while (step < size() && (place & step) == 0) step *= 2;
    Buffer buffer(*mesh_, static_cast<void*>(data.data()), data.size());
    if (place != 0) {
      waiting_for_ = (place - step + root) % size();
      buffer.receive(waiting_for_, slot_broadcast, 0, data.size());
      buffer.wait_received(deadline_);
    }
    int sends = 0;
    for (step /= 2; step > 0; step /= 2) {
      if (place + step >= size()) continue;
      buffer.send((place + step + root) % size(), slot_broadcast, 0, data.size());
      ++sends;
    }
    for (; sends > 0; --sends) buffer.wait_sent(deadline_);
  }

  GlooOptions options_;
  std::optional<TcpStoreServer> server_;
  std::optional<TcpStoreClient> store_;
  std::optional<GlooMesh> mesh_;
  std::vector<std::vector<std::byte>> eager_memory_, scratch_;
  std::vector<std::unique_ptr<Buffer>> eager_in_;
  std::uint64_t sequence_ = 0;
  Deadline deadline_;
  int waiting_for_ = -1;
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
