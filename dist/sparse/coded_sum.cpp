#include "dist/sparse/coded_sum.h"

#include <algorithm>

#include "compress/codec/exponents.h"
#include "dist/comm/ordered_sum.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {
namespace {

// The pieces take turns, chunk by chunk: zeros lie together, in embeddings for instance, and the longest piece counts.
class Chunks {
 public:
  Chunks(std::size_t elements, int ranks)
      : elements_(elements),
        ranks_(static_cast<std::size_t>(ranks)),
        chunk_(std::clamp<std::size_t>((elements + ranks_ - 1) / ranks_, 1, kExponentBlock)) {}

  // fn(begin, count, at) for each chunk of a piece: where it lies in the data, and in the piece. Returns the piece's size.
  std::size_t of(int piece, const auto& fn) const {
    std::size_t at = 0;
    for (std::size_t begin = static_cast<std::size_t>(piece) * chunk_; begin < elements_;
         begin += ranks_ * chunk_) {
      const std::size_t count = std::min(chunk_, elements_ - begin);
      fn(begin, count, at);
      at += count;
    }
    return at;
  }
  std::size_t size(int piece) const {
    return of(piece, [](std::size_t, std::size_t, std::size_t) {});
  }

 private:
  std::size_t elements_, ranks_, chunk_;
};

const bool coded_sum_registered = collectives().add(
    "coded_sum", "dense sums with coded exponents: the bits of dist.ordered_sum, fewer bytes",
    {.of_sums = true});

}  // namespace

template <class T>
CodedSum::Bytes CodedSum::sum(Communicator& communicator, std::span<T> data, std::vector<T>& pieces) {
  const int ranks = communicator.size(), rank = communicator.rank();
  Bytes bytes;
  if (ranks == 1) return bytes;
  const Chunks chunks(data.size(), ranks);
  // Every rank's summand of the own piece, and after them room for another piece.
  const std::size_t size = chunks.size(rank), longest = chunks.size(0);
  pieces.resize(size * static_cast<std::size_t>(ranks) + longest);
  const auto summand = [&](int r) {
    return std::span(pieces).subspan(static_cast<std::size_t>(r) * size, size);
  };
  const auto other = [&](int r) { return std::span(pieces).last(longest).first(chunks.size(r)); };
  const auto take = [&](int piece, std::span<T> to) {
    chunks.of(piece, [&](std::size_t begin, std::size_t count, std::size_t at) {
      std::copy_n(data.begin() + begin, count, to.begin() + at);
    });
  };
  const auto put = [&](int piece, std::span<const T> from) {
    chunks.of(piece, [&](std::size_t begin, std::size_t count, std::size_t at) {
      std::copy_n(from.begin() + at, count, data.begin() + begin);
    });
  };

  mine_.resize(static_cast<std::size_t>(ranks));
  mine_[rank].clear();
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    take(r, other(r));
    encode_exponents(std::span<const T>(other(r)), mine_[r]);
    bytes.sent += mine_[r].size();
  }
  communicator.all_to_all(mine_, theirs_);

  std::vector<const T*> sources;
  for (int r = 0; r < ranks; ++r) {
    sources.push_back(summand(r).data());
    if (r == rank) {
      take(r, summand(r));
    } else {
      decode_exponents(theirs_[r], summand(r));
      bytes.received += theirs_[r].size();
    }
  }
  const std::span<T> sum = other(rank);
  ordered_sum(std::span<const T* const>(sources), sum.data(), sum.size());
  put(rank, sum);
  encode_exponents(std::span<const T>(sum), coded_);
  bytes.sent += coded_.size();
  communicator.all_gather(coded_, theirs_);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    decode_exponents(theirs_[r], other(r));
    put(r, other(r));
    bytes.received += theirs_[r].size();
  }
  return bytes;
}

template CodedSum::Bytes CodedSum::sum(Communicator&, std::span<float>, std::vector<float>&);
template CodedSum::Bytes CodedSum::sum(Communicator&, std::span<BFloat16>, std::vector<BFloat16>&);

}  // namespace topknot
