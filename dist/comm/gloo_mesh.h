#pragma once
// Gloo's TCP transport between all pairs of ranks, reduced to what our collectives use: sends and receives of
// memory, and one call that ends every wait of this rank from any thread. The waits have no limit of their own: Gloo's
// would count the time in which the process was suspended. Only gloo_mesh.cpp includes Gloo.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "nn/base/clock.h"

namespace topknot {

class TcpStoreClient;

class GlooMesh {
 public:
  // Opens this rank's ends and publishes their addresses. `interface` names a network interface, or "" for
  // the address under which this rank reaches the store. Throws UserError where it cannot be used.
  GlooMesh(TcpStoreClient& store, int rank, int size, const std::string& interface);
  ~GlooMesh();

  // Connects to all other ranks, which do the same. `patience`: for their addresses. Throws when it ends, and after fail().
  void connect(TcpStoreClient& store, Patience patience);

  // Ends all waits of this rank and closes the connections, so that the peers' waits end too. From any
  // thread.
  void fail() noexcept;
  bool failed() const;
  // Changes whenever a transfer has ended. From any thread.
  std::uint64_t progress() const;

  // Memory to send from or to receive into. Transfers between two ranks on one slot match in the order in
  // which they were posted; a receive takes a message of its size or a shorter one. Destroying the buffer
  // cancels what is pending.
  class Buffer {
   public:
    Buffer(GlooMesh& mesh, void* data, std::size_t bytes);
    Buffer(GlooMesh& mesh, const void* data, std::size_t bytes)
        : Buffer(mesh, const_cast<void*>(data), bytes) {}
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

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

}  // namespace topknot
