// The sums of GlooCollectives.

#include <algorithm>

#include "dist/comm/gloo_collectives.h"
#include "dist/comm/gloo_messages.h"
#include "dist/comm/ordered_sum.h"

namespace topknot {
namespace {

// Elements that a rank sends at most so that all ranks have all values and sum them themselves.
constexpr std::size_t small_count = 8192;
constexpr std::size_t ring_segment = (1 << 20) / 4;  // elements

void add(const float* addend, std::size_t n, float* sum) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += addend[i];
}

}  // namespace

template <class T>
void GlooCollectives::reduce(std::span<T> data, SumOrder order) {
  if (data.size() * (size_ - 1) <= small_count) return gather_and_add(data);
  check_call(data.size_bytes());
  if (order == SumOrder::ranks)
    reduce_in_rank_order(data);
  else
    reduce_on_ring(data);
}

void GlooCollectives::all_reduce(std::span<float> data, SumOrder order) {
  reduce(data, order);
}

void GlooCollectives::all_reduce(std::span<BFloat16> data, SumOrder order) {
  reduce(data, order);
}

void GlooCollectives::all_reduce(std::span<double> data) {
  if (data.size() * (size_ - 1) <= small_count) return gather_and_add(data);
  check_call(data.size_bytes());
  reduce_in_rank_order(data);
}

template <class T>
void GlooCollectives::gather_and_add(std::span<T> data) {
  exchange_with_all(std::as_bytes(data), scratch_, data.size_bytes());
  std::vector<const T*> sources(size_);
  for (int r = 0; r < size_; ++r)
    sources[r] = r == rank_ ? data.data() : reinterpret_cast<const T*>(scratch_[r].data());
  ordered_sum(std::span<const T* const>(sources), data.data(), data.size());
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
      if (i >= size_) return;
      const ElementRange slice = slice_of(data.size(), size_, peer(i));
      out.send(peer(i), slot_slice, slice.begin * sizeof(T), slice.size() * sizeof(T));
    };
    for (int i = 1; i <= kInFlight; ++i) send(i);
    for (int i = 1; i < size_; ++i) {
      waiting_for_ = peer(size_ - i);
      in[waiting_for_]->wait_received(call_.deadline);
      send(i + kInFlight);
    }
    for (int i = 1; i < size_; ++i) out.wait_sent(call_.deadline);
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
  const auto send = [&](int i) {
    if (i < size_) out.send(peer(i), slot_sum, 0, own.size() * sizeof(T));
  };
  for (int i = 1; i <= kInFlight; ++i) send(i);
  for (int i = 1; i < size_; ++i) {
    waiting_for_ = peer(size_ - i);
    in[waiting_for_]->wait_received(call_.deadline);
    send(i + kInFlight);
  }
  for (int i = 1; i < size_; ++i) out.wait_sent(call_.deadline);
}

// Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. Message m of `messages` belongs to
// step m / segments; what is received in a step is sent on in the next one, so the segments of a chunk
// follow each other around the ring. In the first size-1 steps a received segment is added, in the others
// it is final.
template <class T>
void GlooCollectives::reduce_on_ring(std::span<T> data) {
  const int right = peer(1), left = peer(size_ - 1);
  const std::size_t chunk = slice_of(data.size(), size_, 0).size();  // the largest
  const std::size_t segments = (chunk + ring_segment - 1) / ring_segment;
  const std::size_t adding = (size_ - 1) * segments, messages = 2 * adding;
  // Where message m lies in `data` when this rank receives it; `shift` 1: when it sends it.
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
      in_add.wait_received(call_.deadline);
      const ElementRange to = place(m, 0);
      add(arriving.data() + (m % ahead) * segment, to.size(), data.data() + to.begin);
    } else {
      in_final.wait_received(call_.deadline);
    }
    if (m + segments < messages) send(m + segments);
    if (m + ahead < messages) post(m + ahead);
  }
  waiting_for_ = right;
  for (std::size_t m = 0; m < messages; ++m) out.wait_sent(call_.deadline);
}

}  // namespace topknot
