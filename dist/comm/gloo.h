#pragma once
// The `gloo` backend: connections (GlooMesh), and collectives as messages over them (GlooCollectives). The
// communicator that ranks join is in dist/comm/gloo_communicator.cpp.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "nn/base/clock.h"

namespace topknot {

class TcpStoreClient;

// Gloo's TCP transport between all pairs of ranks, reduced to what our collectives use: sends and receives of
// memory, and one call that ends every wait of this rank from any thread. The waits have no limit of their
// own: Gloo's would count the time in which the process was suspended. Only gloo_mesh.cpp includes Gloo.
class GlooMesh {
 public:
  // Opens this rank's ends and publishes their addresses. `interface` names a network interface, or "" for
  // the address under which this rank reaches the store. Throws UserError if it cannot be used.
  GlooMesh(TcpStoreClient& store, int rank, int size, const std::string& interface);
  ~GlooMesh();

  // Connects to all other ranks, which do the same. `patience`: for their addresses. Throws when it ends, and
  // after fail().
  void connect(TcpStoreClient& store, Patience patience);

  // Ends this rank's waits and closes its connections, which ends the peers' waits. From any thread.
  void fail() noexcept;
  bool failed() const;
  // Changes whenever a transfer has ended. From any thread.
  std::uint64_t progress() const;

  // Memory to send from or to receive into. Transfers between two ranks on one slot match in the order in
  // which they were posted; a receive takes up to its size. Destroying the buffer cancels what is pending.
  class Buffer {
   public:
    Buffer(GlooMesh& mesh, void* data, std::size_t bytes);
    Buffer(GlooMesh& mesh, const void* data, std::size_t bytes)
        : Buffer(mesh, const_cast<void*>(data), bytes) {}
    ~Buffer();

    void send(int rank, std::uint64_t slot, std::size_t offset, std::size_t bytes);
    void receive(int rank, std::uint64_t slot, std::size_t offset, std::size_t bytes);
    // Each waits for one posted transfer. Throws when a connection fails, and after fail().
    void wait_sent();
    void wait_received();

   private:
    friend class GlooMesh;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

 private:
  static std::string key(int from, int to);  // of an address in the store
  struct State;
  std::unique_ptr<State> state_;
};

// These numbers are sent.
enum class GlooOperation : std::uint64_t {
  gather = 1,
  reduce,
  broadcast,
  barrier,
  all_to_all,
  send_receive,
  split
};

// The operation's name for messages; "unknown operation" for a number that is not in the enumeration.
const char* operation_name(GlooOperation operation);

// The ranks disagree about what is called; not a connection's fault.
struct GlooMismatch : Error {
  using Error::Error;
};

// The collectives of the `gloo` backend as messages over the mesh: who sends what to whom, in which order it
// is added, and how the ranks notice that they do not make the same call. Connections that
// fail show as exceptions; what a failure means for the run is the communicator's business.
class GlooCollectives {
 public:
  // One call. All ranks number their calls from 1 in the same order.
  struct Call {
    GlooOperation operation = GlooOperation::barrier;
    std::uint64_t sequence = 0;
  };

  // `mesh` is connected and outlives this. `check_calls`: the ranks compare operation, number and size before
  // calls whose messages would not show a difference.
  // `run_ranks`: for messages.
  GlooCollectives(GlooMesh& mesh, int rank, int size, bool check_calls, const RunRanks& run_ranks = {});

  // Starts a call, which exactly one of the functions below then makes. Each throws GlooMismatch, or Error
  // where a connection fails or is closed; after that, only destruction is left.
  void begin(const Call& call) {
    call_ = call;
    waiting_for_ = -1;
  }

  // all[r] for every other rank r; all[rank] is left alone.
  void gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) {
    exchange_with_all(mine, all, {});
  }
  template <class T>  // float or BFloat16
  void all_reduce(std::span<T> data, SumOrder order);
  void broadcast(std::span<std::byte> data, int root) {
    check_call(data.size());
    broadcast_tree(data, root);
  }
  void barrier() { exchange_with_all({}, scratch_, {}); }
  // theirs[r] for every other rank r; theirs[rank] is left alone.
  void all_to_all(std::span<const std::vector<std::byte>> mine, std::vector<std::vector<std::byte>>& theirs);
  // Only the ranks that are named exchange messages. One that the other side did not name shows at once with
  // `check_calls`; otherwise in the next call between the two, or when fail() ends the wait.
  void send_receive(int to, std::span<const std::byte> mine, int from, std::vector<std::byte>& theirs);

  // The rank for which the current call waits, or waited last; -1: for no one in particular.
  int waiting_for() const { return waiting_for_; }

 private:
  using Buffer = GlooMesh::Buffer;
  struct Header;
  enum class Rest { direct, around };  // the way of what does not fit in a block's first message
  struct Outgoing {
    int rank;
    std::span<const std::byte> block;
  };

  // Starting with its right neighbour, so that the ranks do not all send to rank 0 first.
  int peer(int i) const { return (rank_ + i) % size_; }
  void check_header(const Header& theirs, const Header& mine, int r, bool same_size) const;
  void exchange_with_all(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all,
                         std::optional<std::size_t> size_of_call);
  void exchange(std::span<const Outgoing> outgoing, std::span<const int> sources,
                std::vector<std::vector<std::byte>>& received, std::optional<std::size_t> size_of_call,
                Rest rest);
  void forward(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all);
  void check_call(std::size_t bytes) {
    if (check_calls_) exchange_with_all({}, scratch_, bytes);
  }
  void check_partners(int to, int from);
  template <class T>
  void gather_and_add(std::span<T> data);
  void send_paced(const auto& send, const std::vector<std::unique_ptr<Buffer>>& in, Buffer& out);
  template <class T>
  void reduce_in_rank_order(std::span<T> data);
  template <class T>
  void reduce_on_ring(std::span<T> data);
  void broadcast_tree(std::span<std::byte> data, int root);

  GlooMesh& mesh_;
  const int rank_, size_;
  const bool check_calls_;
  const RunRanks run_ranks_;
  Call call_;
  int waiting_for_ = -1;
  std::vector<std::vector<std::byte>> eager_memory_, eager_out_, scratch_;
  std::vector<std::unique_ptr<Buffer>> eager_in_;  // receives posted for the next call's first messages
};

}  // namespace topknot
