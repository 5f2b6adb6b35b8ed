#include "dist/sparse/coded_sum.h"

#include "compress/codec/exponents.h"
#include "dist/comm/ordered_sum.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {

template <class T>
CodedSum::Bytes CodedSum::sum(Communicator& communicator, std::span<T> data, std::vector<T>& pieces) {
  const int ranks = communicator.size(), rank = communicator.rank();
  Bytes bytes;
  if (ranks == 1) return bytes;
  const auto piece_of = [&](int r) {
    const ElementRange range = slice_of(data.size(), ranks, r);
    return data.subspan(range.begin, range.size());
  };
  mine_.resize(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    encode_exponents(std::span<const T>(piece_of(r)), mine_[r]);
    bytes.sent += mine_[r].size();
  }
  mine_[rank].clear();
  communicator.all_to_all(mine_, theirs_);

  const std::span<T> sum = piece_of(rank);
  pieces.resize(sum.size() * static_cast<std::size_t>(ranks));
  std::vector<const T*> sources;
  for (int r = 0; r < ranks; ++r) {
    const std::span<T> piece = std::span(pieces).subspan(sources.size() * sum.size(), sum.size());
    sources.push_back(r == rank ? sum.data() : piece.data());
    if (r == rank) continue;
    decode_exponents(theirs_[r], piece);
    bytes.received += theirs_[r].size();
  }
  ordered_sum(std::span<const T* const>(sources), sum.data(), sum.size());
  encode_exponents(std::span<const T>(sum), coded_);
  bytes.sent += coded_.size();
  communicator.all_gather(coded_, theirs_);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    decode_exponents(theirs_[r], piece_of(r));
    bytes.received += theirs_[r].size();
  }
  return bytes;
}

template CodedSum::Bytes CodedSum::sum(Communicator&, std::span<float>, std::vector<float>&);
template CodedSum::Bytes CodedSum::sum(Communicator&, std::span<BFloat16>, std::vector<BFloat16>&);

namespace {

const bool coded_sum_registered =
    (collectives().add("coded_sum",
                       "dense sums with coded exponents: the bits of dist.ordered_sum, fewer bytes",
                       {.of_sums = true}),
     true);

}  // namespace
}  // namespace topknot
