#include "dist/comm/gloo.h"

#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <system_error>

#include "dist/rendezvous/tcp_store.h"

namespace topknot {
namespace {

constexpr std::chrono::hours kNoLimit{24 * 365};

// Gloo writes to sockets whose other end may be gone. A handler that the program set stays.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

}  // namespace

struct GlooMesh::State {
  std::shared_ptr<gloo::transport::Device> device;
  std::shared_ptr<gloo::transport::Context> context;
  int rank = 0, size = 1;
  std::atomic<bool> failed{false};
  std::atomic<std::uint64_t> progress{0};
  std::mutex mutex;  // guards buffers, and keeps each alive while fail() touches it
  std::set<gloo::transport::UnboundBuffer*> buffers;
};

struct GlooMesh::Buffer::Impl {
  GlooMesh::State& mesh;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

GlooMesh::GlooMesh(TcpStoreClient& store, int rank, int size, const std::string& interface)
    : state_(std::make_unique<State>()) {
  ignore_broken_pipes();
  gloo::transport::tcp::attr attributes;
  if (interface.empty())
    attributes.hostname = store.address();
  else
    attributes.iface = interface;
  state_->rank = rank;
  state_->size = size;
  try {
    state_->device = gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::system_error&) {
    throw;  // of its thread; nothing is wrong with the address
  } catch (const std::exception& error) {
    throw UserError(
        "dist.interface: cannot use " +
        (interface.empty() ? "the address " + store.address() : "the interface '" + interface + "'") +
        " for the connections between ranks (" + error.what() + "); `ip address` lists what there is");
  }
  state_->context = state_->device->createContext(rank, size);
  state_->context->setTimeout(kNoLimit);  // while connecting
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    auto& pair = state_->context->createPair(r);
    pair->setLocalRank(0);
    const auto address = pair->address().bytes();
    store.set(key(rank, r), std::string(address.begin(), address.end()));
  }
}

std::string GlooMesh::key(int from, int to) {
  return "address of " + std::to_string(from) + " for " + std::to_string(to);
}

void GlooMesh::connect(TcpStoreClient& store, Patience patience) {
  for (int r = 0; r < state_->size; ++r) {
    if (r == state_->rank) continue;
    const std::string name = rank_name(store.run_ranks(), r);
    const std::string address = store.get(key(r, state_->rank), patience, r);
    try {
      state_->context->getPair(r)->connect({address.begin(), address.end()});
    } catch (const std::exception& error) {
      throw Error("the connection to " + name + " failed: " + error.what());
    }
    if (failed()) throw Error(name + " did not connect");
  }
}

GlooMesh::~GlooMesh() {
  fail();
}

void GlooMesh::fail() noexcept {
  if (state_->failed.exchange(true)) return;
  try {
    {
      const std::lock_guard lock(state_->mutex);
      for (auto* buffer : state_->buffers) {
        buffer->abortWaitRecv();
        buffer->abortWaitSend();
      }
    }
    for (int r = 0; r < state_->size; ++r)
      if (r != state_->rank && state_->context) state_->context->getPair(r)->close();
  } catch (...) {
    // Nothing more can be done; the connections close when the process ends.
  }
}

bool GlooMesh::failed() const {
  return state_->failed;
}

std::uint64_t GlooMesh::progress() const {
  return state_->progress;
}

GlooMesh::Buffer::Buffer(GlooMesh& mesh, void* data, std::size_t bytes)
    : impl_(new Impl{*mesh.state_, mesh.state_->context->createUnboundBuffer(data, bytes)}) {
  const std::lock_guard lock(impl_->mesh.mutex);
  impl_->mesh.buffers.insert(impl_->buffer.get());
}

GlooMesh::Buffer::~Buffer() {
  const std::lock_guard lock(impl_->mesh.mutex);
  impl_->mesh.buffers.erase(impl_->buffer.get());
}

void GlooMesh::Buffer::send(int rank, std::uint64_t slot, std::size_t offset, std::size_t bytes) {
  if (impl_->mesh.failed) throw Error("the connections are closed");
  impl_->buffer->send(rank, slot, offset, bytes);
}

void GlooMesh::Buffer::receive(int rank, std::uint64_t slot, std::size_t offset, std::size_t bytes) {
  if (impl_->mesh.failed) throw Error("the connections are closed");
  impl_->buffer->recv(rank, slot, offset, bytes);
}

void GlooMesh::Buffer::wait_sent() {
  if (impl_->mesh.failed || !impl_->buffer->waitSend(kNoLimit)) throw Error("the connections are closed");
  ++impl_->mesh.progress;
}

void GlooMesh::Buffer::wait_received() {
  if (impl_->mesh.failed || !impl_->buffer->waitRecv(kNoLimit)) throw Error("the connections are closed");
  ++impl_->mesh.progress;
}

}  // namespace topknot
