#include "dist/comm/gloo.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "dist/comm/ordered_sum.h"

namespace topknot {
namespace {

enum GlooSlot : std::uint64_t {
  slot_eager = 1,
  slot_block,
  slot_slice,
  slot_sum,
  slot_ring,
  slot_broadcast,
  slot_forward  // and up, one per step
};

// A rank's long messages in flight where each sends to all others: of more a link's queue drops some.
constexpr int kInFlight = 3;

constexpr std::size_t eager_bytes = 4096;  // header and start of a block, sent before sizes are known

// Elements that a rank sends at most so that all ranks have all values and sum them themselves.
constexpr std::size_t small_count = 8192;
constexpr std::size_t ring_segment = (1 << 20) / 4;  // elements

void add(const float* a, const float* b, std::size_t n, float* sum) {
  for (std::size_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

}  // namespace

struct GlooCollectives::Header {
  GlooOperation operation;
  std::uint64_t sequence;
  std::uint64_t size;   // bytes of the call, as this rank sees it
  std::uint64_t block;  // bytes of the block that this message starts
};

const char* operation_name(GlooOperation operation) {
  static constexpr const char* names[] = {"all_gather", "all_reduce",   "broadcast", "barrier",
                                          "all_to_all", "send_receive", "split"};
  static_assert(std::size(names) == static_cast<std::size_t>(GlooOperation::split));
  const auto place = static_cast<std::uint64_t>(operation) - 1;
  return place < std::size(names) ? names[place] : "unknown operation";
}

GlooCollectives::GlooCollectives(GlooMesh& mesh, int rank, int size, bool check_calls,
                                 const RunRanks& run_ranks)
    : mesh_(mesh),
      rank_(rank),
      size_(size),
      check_calls_(check_calls),
      run_ranks_(run_ranks),
      eager_memory_(size),
      eager_out_(size),
      eager_in_(size) {
  for (int i = 1; i < size_; ++i) {
    const int r = peer(i);
    eager_memory_[r].resize(eager_bytes);
    eager_out_[r].resize(eager_bytes);
    eager_in_[r] = std::make_unique<Buffer>(mesh_, eager_memory_[r].data(), eager_bytes);
    eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);
  }
}

void GlooCollectives::check_header(const Header& theirs, const Header& mine, int r, bool same_size) const {
  if (theirs.operation == mine.operation && theirs.sequence == mine.sequence &&
      (!same_size || theirs.size == mine.size))
    return;
  const auto text = [](const Header& h) {
    return fmt::format("{} #{} of {} bytes", operation_name(h.operation), h.sequence, h.size);
  };
  throw GlooMismatch(fmt::format("the ranks do not make the same calls: {} is in {}, {} in {}",
                                 rank_name(run_ranks_, rank_), text(mine), rank_name(run_ranks_, r),
                                 text(theirs)));
}

void GlooCollectives::exchange_with_all(std::span<const std::byte> mine,
                                        std::vector<std::vector<std::byte>>& all,
                                        std::optional<std::size_t> size_of_call) {
  std::vector<Outgoing> outgoing;
  std::vector<int> sources;
  for (int i = 1; i < size_; ++i) outgoing.push_back({peer(i), mine});
  for (int i = 1; i < size_; ++i) sources.push_back(peer(size_ - i));  // as they send to this rank
  exchange(outgoing, sources, all, size_of_call, Rest::around);
  forward(mine, all);
}

// Sends around the ring the part of each block that did not fit in the first message: in step s each rank
// sends its right neighbour the block that it received from the left in step s - 1, its own block first.
// Every link then carries one long message at a time for any number of ranks.
void GlooCollectives::forward(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) {
  constexpr std::size_t room = eager_bytes - sizeof(Header);
  const auto block = [&](int r) -> std::span<const std::byte> {
    return r == rank_ ? mine : std::span<const std::byte>(all[r]);
  };
  const int right = peer(1), left = peer(size_ - 1);
  std::vector<std::unique_ptr<Buffer>> in(size_), out;
  for (int s = 0; s + 1 < size_; ++s) {
    const int r = peer(size_ - 1 - s);
    if (all[r].size() <= room) continue;
    in[r] = std::make_unique<Buffer>(mesh_, static_cast<void*>(all[r].data()), all[r].size());
    in[r]->receive(left, slot_forward + s, room, all[r].size() - room);
  }
  for (int s = 0; s + 1 < size_; ++s) {
    const std::span<const std::byte> bytes = block(peer(size_ - s));
    if (bytes.size() > room) {
      out.push_back(std::make_unique<Buffer>(mesh_, static_cast<const void*>(bytes.data()), bytes.size()));
      out.back()->send(right, slot_forward + s, room, bytes.size() - room);
    }
    waiting_for_ = left;
    const int next = peer(size_ - 1 - s);
    if (in[next]) in[next]->wait_received();
  }
  waiting_for_ = right;
  for (auto& buffer : out) buffer->wait_sent();
}

// received[r] for every r of `sources`; the others' are left alone. A block starts in the eager message; what
// is longer follows directly, or is left to forward(). `size_of_call`, if given, is the same on all.
void GlooCollectives::exchange(std::span<const Outgoing> outgoing, std::span<const int> sources,
                               std::vector<std::vector<std::byte>>& received,
                               std::optional<std::size_t> size_of_call, Rest rest) {
  constexpr std::size_t room = eager_bytes - sizeof(Header);
  Header own{call_.operation, call_.sequence, size_of_call.value_or(0), 0};
  std::vector<std::unique_ptr<Buffer>> out, rest_out(outgoing.size());
  for (const auto& [r, block] : outgoing) {
    own.block = block.size();
    if (!size_of_call) own.size = block.size();
    const std::size_t head = std::min(room, block.size());
    std::byte* message = eager_out_[r].data();
    std::memcpy(message, &own, sizeof own);
    std::copy_n(block.begin(), head, message + sizeof own);
    out.push_back(std::make_unique<Buffer>(mesh_, message, sizeof own + head));
    out.back()->send(r, slot_eager, 0, sizeof own + head);
  }
  for (std::size_t i = 0; i < outgoing.size(); ++i) {
    const auto& [r, block] = outgoing[i];
    if (rest == Rest::around || block.size() <= room) continue;
    rest_out[i] = std::make_unique<Buffer>(mesh_, static_cast<const void*>(block.data()), block.size());
  }
  // Paced by what arrives: the ranks take the same turns, so the i-th message is sent as the i-th comes.
  std::size_t sent = 0;
  const auto send_until = [&](std::size_t end) {
    for (; sent < std::min(end, outgoing.size()); ++sent)
      if (rest_out[sent]) {
        const auto& [r, block] = outgoing[sent];
        rest_out[sent]->send(r, slot_block, room, block.size() - room);
      }
  };

  received.resize(size_);
  std::vector<std::unique_ptr<Buffer>> rest_in(size_);
  for (const int r : sources) {
    waiting_for_ = r;
    eager_in_[r]->wait_received();
    const std::byte* bytes = eager_memory_[r].data();
    Header theirs;
    std::memcpy(&theirs, bytes, sizeof theirs);
    check_header(theirs, own, r, size_of_call.has_value());
    received[r].resize(theirs.block);
    std::copy_n(bytes + sizeof theirs, std::min<std::size_t>(room, theirs.block), received[r].begin());
    eager_in_[r]->receive(r, slot_eager, 0, eager_bytes);  // for the next call
    if (rest == Rest::direct && theirs.block > room) {
      rest_in[r] =
          std::make_unique<Buffer>(mesh_, static_cast<void*>(received[r].data()), received[r].size());
      rest_in[r]->receive(r, slot_block, room, theirs.block - room);
    }
  }
  // Only now: what lets a peer send goes over the same connection, and would wait for a long block.
  send_until(kInFlight);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    waiting_for_ = sources[i];
    if (rest_in[sources[i]]) rest_in[sources[i]]->wait_received();
    send_until(i + 1 + kInFlight);
  }
  send_until(outgoing.size());
  for (std::size_t i = 0; i < outgoing.size(); ++i) {
    waiting_for_ = outgoing[i].rank;
    out[i]->wait_sent();
    if (rest_out[i]) rest_out[i]->wait_sent();
  }
}

void GlooCollectives::all_to_all(std::span<const std::vector<std::byte>> mine,
                                 std::vector<std::vector<std::byte>>& theirs) {
  std::vector<Outgoing> outgoing;
  std::vector<int> sources;
  for (int i = 1; i < size_; ++i) outgoing.push_back({peer(i), mine[peer(i)]});
  for (int i = 1; i < size_; ++i) sources.push_back(peer(size_ - i));
  exchange(outgoing, sources, theirs, {}, Rest::direct);
}

void GlooCollectives::send_receive(int to, std::span<const std::byte> mine, int from,
                                   std::vector<std::byte>& theirs) {
  if (check_calls_) check_partners(to, from);
  std::vector<Outgoing> outgoing;
  std::vector<int> sources;
  if (to >= 0) outgoing.push_back({to, mine});
  if (from >= 0) sources.push_back(from);
  // The block goes to the caller's memory, not by way of ours.
  if (from >= 0) scratch_.resize(size_), scratch_[from].swap(theirs);
  exchange(outgoing, sources, scratch_, {}, Rest::direct);
  if (from >= 0) scratch_[from].swap(theirs);
}

void GlooCollectives::check_partners(int to, int from) {
  const std::int32_t own[2] = {to, from};
  exchange_with_all(std::as_bytes(std::span(own)), scratch_, sizeof own);
  std::vector<std::pair<int, int>> partners(size_, {to, from});
  for (int i = 1; i < size_; ++i) {
    std::int32_t theirs[2];
    std::memcpy(theirs, scratch_[peer(i)].data(), sizeof theirs);
    partners[peer(i)] = {theirs[0], theirs[1]};
  }
  const std::string problem = unmatched_partners(partners, run_ranks_);
  if (!problem.empty()) throw GlooMismatch(problem);
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
    buffer.wait_received();
  }
  int sends = 0;
  for (step /= 2; step > 0; step /= 2) {
    if (place + step >= size_) continue;
    buffer.send((place + step + root) % size_, slot_broadcast, 0, data.size());
    ++sends;
  }
  for (; sends > 0; --sends) buffer.wait_sent();
}

template <class T>
void GlooCollectives::all_reduce(std::span<T> data, SumOrder order) {
  if (data.size() * (size_ - 1) <= small_count) return gather_and_add(data);
  check_call(data.size_bytes());
  if (order == SumOrder::ranks)
    reduce_in_rank_order(data);
  else
    reduce_on_ring(data);
}

template void GlooCollectives::all_reduce(std::span<float> data, SumOrder order);
template void GlooCollectives::all_reduce(std::span<BFloat16> data, SumOrder order);

template <class T>
void GlooCollectives::gather_and_add(std::span<T> data) {
  exchange_with_all(std::as_bytes(data), scratch_, data.size_bytes());
  std::vector<const T*> sources(size_);
  for (int r = 0; r < size_; ++r)
    sources[r] = r == rank_ ? data.data() : reinterpret_cast<const T*>(scratch_[r].data());
  ordered_sum(std::span<const T* const>(sources), data.data(), data.size());
}

// send(i) to each peer i, a few at a time: the next one goes when a message of this round has come in.
void GlooCollectives::send_paced(const auto& send, const std::vector<std::unique_ptr<Buffer>>& in,
                                 Buffer& out) {
  for (int i = 1; i <= kInFlight && i < size_; ++i) send(i);
  for (int i = 1; i < size_; ++i) {
    waiting_for_ = peer(size_ - i);
    in[waiting_for_]->wait_received();
    if (i + kInFlight < size_) send(i + kInFlight);
  }
  for (int i = 1; i < size_; ++i) out.wait_sent();
}

template <class T>
void GlooCollectives::reduce_in_rank_order(std::span<T> data) {
  const ElementRange own = slice_of(data.size(), size_, rank_);
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
    const auto send = [&](int i) {
      const ElementRange slice = slice_of(data.size(), size_, peer(i));
      out.send(peer(i), slot_slice, slice.begin * sizeof(T), slice.size() * sizeof(T));
    };
    send_paced(send, in, out);
  }
  std::vector<std::unique_ptr<Buffer>> in(size_);
  for (int i = 1; i < size_; ++i) {
    const int r = peer(size_ - i);
    const ElementRange slice = slice_of(data.size(), size_, r);
    in[r] = std::make_unique<Buffer>(mesh_, static_cast<void*>(data.data() + slice.begin),
                                     slice.size() * sizeof(T));
    in[r]->receive(r, slot_sum, 0, slice.size() * sizeof(T));
  }
  ordered_sum(std::span<const T* const>(sources), data.data() + own.begin, own.size());
  Buffer out(mesh_, static_cast<const void*>(data.data() + own.begin), own.size() * sizeof(T));
  const auto send = [&](int i) { out.send(peer(i), slot_sum, 0, own.size() * sizeof(T)); };
  send_paced(send, in, out);
}

// Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. Message m of `messages` belongs to step
// m / segments; what is received in a step is sent on in the next one, so the segments of a chunk follow each
// other around the ring. For size-1 steps what is received is added, then final.
template <class T>
void GlooCollectives::reduce_on_ring(std::span<T> data) {
  const int right = peer(1), left = peer(size_ - 1);
  const std::size_t chunk = slice_of(data.size(), size_, 0).size();  // the largest
  const std::size_t segments = (chunk + ring_segment - 1) / ring_segment;
  const std::size_t adding = (size_ - 1) * segments, messages = 2 * adding;
  // The range of message m in `data`, with `shift` 0 when this rank receives it and 1 when it sends it.
  const auto place = [&](std::size_t m, int shift) {
    const int step = static_cast<int>(m / segments);
    const int index = ((rank_ - step - 1 + shift) % size_ + size_) % size_;
    const ElementRange all = slice_of(data.size(), size_, index);
    const std::size_t begin = std::min(all.end, all.begin + (m % segments) * ring_segment);
    return ElementRange{begin, std::min(all.end, begin + ring_segment)};
  };
  constexpr std::size_t ahead = 4;  // receives that are posted before they are waited for
  const std::size_t segment = std::min(chunk, ring_segment);
  std::vector<T> arriving(ahead * segment);
  Buffer in_add(mesh_, static_cast<void*>(arriving.data()), arriving.size() * sizeof(T));
  Buffer in_final(mesh_, static_cast<void*>(data.data()), data.size_bytes());
  Buffer out(mesh_, static_cast<const void*>(data.data()), data.size_bytes());
  const auto post = [&](std::size_t m) {
    const ElementRange to = place(m, 0);
    if (m < adding)
      in_add.receive(left, slot_ring, (m % ahead) * segment * sizeof(T), to.size() * sizeof(T));
    else
      in_final.receive(left, slot_ring, to.begin * sizeof(T), to.size() * sizeof(T));
  };
  const auto send = [&](std::size_t m) {
    const ElementRange from = place(m, 1);
    out.send(right, slot_ring, from.begin * sizeof(T), from.size() * sizeof(T));
  };
  for (std::size_t m = 0; m < std::min(ahead, messages); ++m) post(m);
  for (std::size_t m = 0; m < segments; ++m) send(m);
  for (std::size_t m = 0; m < messages; ++m) {
    waiting_for_ = left;
    if (m < adding) {
      in_add.wait_received();
      const ElementRange to = place(m, 0);
      T* sum = data.data() + to.begin;
      add(sum, arriving.data() + (m % ahead) * segment, to.size(), sum);
    } else {
      in_final.wait_received();
    }
    if (m + segments < messages) send(m + segments);
    if (m + ahead < messages) post(m + ahead);
  }
  waiting_for_ = right;
  for (std::size_t m = 0; m < messages; ++m) out.wait_sent();
}

}  // namespace topknot
