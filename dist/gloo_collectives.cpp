#include "dist/gloo_collectives.h"

#include <algorithm>
#include <cstring>

#include "dist/ordered_sum.h"

namespace topknot {
namespace {

constexpr std::size_t eager_bytes = 4096;  // header and start of a block, sent before sizes are known
constexpr std::size_t small_count = 8192;  // elements summed after a plain all-gather
constexpr std::size_t ring_segment = (1 << 20) / 4;  // floats
enum Slot : std::uint64_t { slot_eager = 1, slot_block, slot_slice, slot_sum, slot_ring, slot_broadcast };

}  // namespace

struct GlooCollectives::Header {
  GlooOperation operation;
  std::uint64_t sequence;
  std::uint64_t size;   // bytes of the call, as this rank sees it
  std::uint64_t block;  // bytes of the block that this message starts
};

const char* operation_name(GlooOperation operation) {
  switch (operation) {
    case GlooOperation::gather:
      return "all_gather";
    case GlooOperation::reduce:
      return "all_reduce";
    case GlooOperation::reduce_double:
      return "all_reduce of doubles";
    case GlooOperation::broadcast:
      return "broadcast";
    case GlooOperation::barrier:
      return "barrier";
  }
  return "unknown operation";
}

GlooCollectives::GlooCollectives(GlooMesh& mesh, int rank, int size, bool check_calls)
    : mesh_(mesh), rank_(rank), size_(size), check_calls_(check_calls), eager_memory_(size), eager_in_(size) {
  for (int i = 1; i < size_; ++i) {
    const int r = peer(i);
    eager_memory_[r].resize(eager_bytes);
    eager_in_[r] = std::make_unique<Buffer>(mesh_, eager_memory_[r].data(), eager_bytes);
    eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);
  }
}

void GlooCollectives::begin(const Call& call) {
  call_ = call;
  waiting_for_ = -1;
}

void GlooCollectives::gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) {
  exchange(mine, all, {});
}

void GlooCollectives::all_reduce(std::span<float> data, SumOrder order) {
  if (data.size() <= small_count) return gather_and_add(data);
  check_call(data.size_bytes());
  if (order == SumOrder::ranks)
    reduce_in_rank_order(data);
  else
    reduce_on_ring(data);
}

void GlooCollectives::all_reduce(std::span<double> data) {
  if (data.size() <= small_count) return gather_and_add(data);
  check_call(data.size_bytes());
  reduce_in_rank_order(data);
}

void GlooCollectives::broadcast(std::span<std::byte> data, int root) {
  check_call(data.size());
  broadcast_tree(data, root);
}

void GlooCollectives::barrier() {
  exchange({}, scratch_, {});
}

void GlooCollectives::check_header(const Header& theirs, const Header& mine, int r, bool same_size) const {
  if (theirs.operation == mine.operation && theirs.sequence == mine.sequence &&
      (!same_size || theirs.size == mine.size))
    return;
  const auto text = [](const Header& h) {
    return std::string(operation_name(h.operation)) + " #" + std::to_string(h.sequence) + " of " +
           std::to_string(h.size) + " bytes";
  };
  throw GlooMismatch("the ranks do not make the same calls: rank " + std::to_string(rank_) + " is in " +
                     text(mine) + ", rank " + std::to_string(r) + " in " + text(theirs));
}

// all[r] for every other rank r. `mine` starts in the eager message; what is longer follows at once.
// With `size_of_call` given, it must be the same on all ranks.
void GlooCollectives::exchange(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all,
                               std::optional<std::size_t> size_of_call) {
  constexpr std::size_t room = eager_bytes - sizeof(Header);
  const Header header{call_.operation, call_.sequence, size_of_call.value_or(mine.size()), mine.size()};
  std::byte message[eager_bytes];
  std::memcpy(message, &header, sizeof header);
  const std::size_t head = std::min(room, mine.size());
  std::copy_n(mine.begin(), head, message + sizeof header);
  Buffer out(mesh_, message, sizeof header + head);
  std::optional<Buffer> rest_out;
  if (mine.size() > room) rest_out.emplace(mesh_, static_cast<const void*>(mine.data()), mine.size());
  for (int i = 1; i < size_; ++i) out.send(peer(i), slot_eager, 0, sizeof header + head);
  if (rest_out)
    for (int i = 1; i < size_; ++i) rest_out->send(peer(i), slot_block, room, mine.size() - room);

  all.resize(size_);
  std::vector<std::unique_ptr<Buffer>> rest_in(size_);
  for (int i = 1; i < size_; ++i) {
    const int r = waiting_for_ = peer(size_ - i);  // in the order in which they send to this rank
    eager_in_[r]->wait_received(call_.deadline);
    const std::byte* bytes = eager_memory_[r].data();
    Header theirs;
    std::memcpy(&theirs, bytes, sizeof theirs);
    check_header(theirs, header, r, size_of_call.has_value());
    all[r].resize(theirs.block);
    std::copy_n(bytes + sizeof theirs, std::min<std::size_t>(room, theirs.block), all[r].begin());
    eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);  // for the next call
    if (theirs.block > room) {
      rest_in[r] = std::make_unique<Buffer>(mesh_, static_cast<void*>(all[r].data()), all[r].size());
      rest_in[r]->receive(r, slot_block, room, theirs.block - room);
    }
  }
  for (int i = 1; i < size_; ++i) {
    waiting_for_ = peer(size_ - i);
    if (rest_in[waiting_for_]) rest_in[waiting_for_]->wait_received(call_.deadline);
  }
  for (int i = 1; i < size_; ++i) {
    waiting_for_ = -1;
    out.wait_sent(call_.deadline);
    if (rest_out) rest_out->wait_sent(call_.deadline);
  }
}

void GlooCollectives::check_call(std::size_t bytes) {
  if (check_calls_) exchange({}, scratch_, bytes);
}

template <class T>
void GlooCollectives::gather_and_add(std::span<T> data) {
  exchange(std::as_bytes(data), scratch_, data.size_bytes());
  std::vector<const T*> sources(size_);
  for (int r = 0; r < size_; ++r)
    sources[r] = r == rank_ ? data.data() : reinterpret_cast<const T*>(scratch_[r].data());
  ordered_sum<T>(sources, data.data(), data.size());
}

template <class T>
void GlooCollectives::reduce_in_rank_order(std::span<T> data) {
  const Slice own = slice_of(data.size(), size_, rank_);
  std::vector<std::vector<std::byte>>& theirs = scratch_;
  theirs.resize(size_);
  std::vector<const T*> sources(size_);
  sources[rank_] = data.data() + own.begin;
  {
    std::vector<std::unique_ptr<Buffer>> in(size_);
    for (int i = 1; i < size_; ++i) {
      const int r = peer(size_ - i);
      theirs[r].resize(own.size() * sizeof(T));
      sources[r] = reinterpret_cast<const T*>(theirs[r].data());
      in[r] = std::make_unique<Buffer>(mesh_, static_cast<void*>(theirs[r].data()), theirs[r].size());
      in[r]->receive(r, slot_slice, 0, theirs[r].size());
    }
    Buffer out(mesh_, static_cast<const void*>(data.data()), data.size_bytes());
    for (int i = 1; i < size_; ++i) {
      const Slice slice = slice_of(data.size(), size_, peer(i));
      out.send(peer(i), slot_slice, slice.begin * sizeof(T), slice.size() * sizeof(T));
    }
    for (int i = 1; i < size_; ++i) {
      waiting_for_ = peer(size_ - i);
      in[waiting_for_]->wait_received(call_.deadline);
    }
    for (int i = 1; i < size_; ++i) out.wait_sent(call_.deadline);
  }
  std::vector<std::unique_ptr<Buffer>> in(size_);
  for (int i = 1; i < size_; ++i) {
    const int r = peer(size_ - i);
    const Slice slice = slice_of(data.size(), size_, r);
    in[r] = std::make_unique<Buffer>(mesh_, static_cast<void*>(data.data() + slice.begin),
                                     slice.size() * sizeof(T));
    in[r]->receive(r, slot_sum, 0, slice.size() * sizeof(T));
  }
  ordered_sum<T>(sources, data.data() + own.begin, own.size());
  Buffer out(mesh_, static_cast<const void*>(data.data() + own.begin), own.size() * sizeof(T));
  for (int i = 1; i < size_; ++i) out.send(peer(i), slot_sum, 0, own.size() * sizeof(T));
  for (int i = 1; i < size_; ++i) {
    waiting_for_ = peer(size_ - i);
    in[waiting_for_]->wait_received(call_.deadline);
  }
  for (int i = 1; i < size_; ++i) out.wait_sent(call_.deadline);
}

// Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. Message m of `messages` belongs to
// step m / segments; what is received in a step is sent on in the next one, so the segments of a chunk
// follow each other around the ring. In the first size-1 steps a received segment is added, in the others
// it is final.
void GlooCollectives::reduce_on_ring(std::span<float> data) {
  const int right = peer(1), left = peer(size_ - 1);
  const std::size_t chunk = slice_of(data.size(), size_, 0).size();  // the largest
  const std::size_t segments = (chunk + ring_segment - 1) / ring_segment;
  const std::size_t adding = (size_ - 1) * segments, messages = 2 * adding;
  // Where message m lies in `data` when this rank receives it; `shift` 1: when it sends it.
  const auto place = [&](std::size_t m, int shift) {
    const int step = static_cast<int>(m / segments);
    const int index = ((rank_ - step - 1 + shift) % size_ + size_) % size_;
    const Slice all = slice_of(data.size(), size_, index);
    const std::size_t begin = std::min(all.end, all.begin + (m % segments) * ring_segment);
    return Slice{begin, std::min(all.end, begin + ring_segment)};
  };
  constexpr std::size_t ahead = 4;  // receives that are posted before they are waited for
  const std::size_t segment = std::min(chunk, ring_segment);
  std::vector<float> arriving(ahead * segment);
  Buffer in_add(mesh_, static_cast<void*>(arriving.data()), arriving.size() * sizeof(float));
  Buffer in_final(mesh_, static_cast<void*>(data.data()), data.size_bytes());
  Buffer out(mesh_, static_cast<const void*>(data.data()), data.size_bytes());
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
      in_add.wait_received(call_.deadline);
      const Slice to = place(m, 0);
      const float* source = arriving.data() + (m % ahead) * segment;
      float* target = data.data() + to.begin;
      for (std::size_t i = 0; i < to.size(); ++i) target[i] += source[i];
    } else {
      in_final.wait_received(call_.deadline);
    }
    if (m + segments < messages) send(m + segments);
    if (m + ahead < messages) post(m + ahead);
  }
  waiting_for_ = right;
  for (std::size_t m = 0; m < messages; ++m) out.wait_sent(call_.deadline);
}

void GlooCollectives::broadcast_tree(std::span<std::byte> data, int root) {
  if (data.empty()) return;
  const int place = (rank_ - root + size_) % size_;  // the root is 0
  int step = 1;
  while (step < size_ && (place & step) == 0) step *= 2;
  Buffer buffer(mesh_, static_cast<void*>(data.data()), data.size());
  if (place != 0) {
    waiting_for_ = (place - step + root) % size_;
    buffer.receive(waiting_for_, slot_broadcast, 0, data.size());
    buffer.wait_received(call_.deadline);
  }
  int sends = 0;
  for (step /= 2; step > 0; step /= 2) {
    if (place + step >= size_) continue;
    buffer.send((place + step + root) % size_, slot_broadcast, 0, data.size());
    ++sends;
  }
  for (; sends > 0; --sends) buffer.wait_sent(call_.deadline);
}

}  // namespace topknot
