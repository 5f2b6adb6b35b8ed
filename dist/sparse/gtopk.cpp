// gTop-k (Shi, Wang, Zhao, Tang, Wang, Tang, Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
// Sparsification for Low Bandwidth Networks", ICDCS 2019, algorithm 3): a tree adds the ranks' entries and
// keeps k at each node, and what the root keeps is sent back down. The result is not the k largest of the
// whole sum: what a node drops is not known above it.
//
// The tree is binomial, for any number of ranks. In round r = 0, 1, ... rank p whose lowest set bit is r
// sends what it holds to p - 2^r, which adds it to its own (own + received), keeps the k of largest
// magnitude, of equals the lower positions, and goes on. Its own entries are cut to k first.
//
// Which entries go back to the residuals: the reference code (gtopkssgd, allreducer.py) looks only whether
// the position survived. But an entry may be dropped at a node while its position wins through another
// branch; its value is then in neither the sum nor the residual. Here a rank gets back every entry whose
// value is not contained in the sum. Each node remembers for each round what it dropped and which positions
// the child had sent. On the way down the child gets the sum and, of its positions in the sum, those at which
// its subtree's value was dropped, by this node or above; the rest follows from the positions of the sum.
// Unlike the reference, positions are sent as integers, for any number of ranks.
//
// A message up is a block (compress/codec/codec.h), one down is
//   u32 n;  n * u32: which of the sum's entries lack the receiver's values, ascending;  the sum's block.
// 2 ceil(log2 P) rounds, each one send_receive() of all ranks, whatever the entries are.

#include <cstring>

#include "compress/codec/codec.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {
namespace {

struct Merge {
  std::vector<std::uint32_t> received, dropped;  // positions, ascending
};

// Calls body(ordinal) for each of `indices` that is also in `positions`; both ascending.
template <class Body>
void for_common(const std::vector<std::uint32_t>& indices, const std::vector<std::uint32_t>& positions,
                const Body& body) {
  std::size_t j = 0;
  for (std::size_t i = 0; i < indices.size() && j < positions.size(); ++i) {
    while (j < positions.size() && positions[j] < indices[i]) ++j;
    if (j < positions.size() && positions[j] == indices[i]) body(i);
  }
}

class GTopK final : public SparseCollective {
 public:
  explicit GTopK(const SparseCollectiveOptions& options)
      : numel_(options.numel), index_codec_(options.index_codec), values_(&value_codecs().find("fp32")) {}

  void sum(Communicator& communicator, const SparseVector& mine, std::size_t k, SparseSum& result) override {
    result.bytes_sent = result.bytes_received = 0;
    take_finite(mine, result.sum);
    std::vector<std::uint32_t> cut;
    keep_k_largest(result.sum, k, cut);
    up(communicator, k, result);
    down(communicator, result);
    mark(result.sum, cut);
    result.rejected.clear();
    if (!result.sum.finite) return;
    const std::vector<std::uint32_t>& kept = result.sum.indices;
    std::size_t at = 0;
    for (const std::uint32_t position : mine.indices) {
      while (at < kept.size() && kept[at] < position) ++at;
      if (at == kept.size() || kept[at] != position || lacks_[at]) result.rejected.push_back(position);
    }
  }

 private:
  // Leaves the whole tree's entries at rank 0, and a subtree's elsewhere.
  void up(Communicator& communicator, std::size_t k, SparseSum& result) {
    merges_.clear();
    const int rank = communicator.rank(), ranks = communicator.size();
    std::vector<std::byte> block, received;
    SparseVector theirs, both;
    for (int reach = 1; reach < ranks; reach *= 2) {
      const bool sends = rank % (2 * reach) == reach, receives = is_parent(rank, reach, ranks);
      block.clear();
      if (sends) block = write_block(result.sum, numel_, *index_codec_, *values_);
      exchange(communicator, sends ? rank - reach : -1, block, receives ? rank + reach : -1, received,
               result);
      Merge merge;
      if (receives) {
        read_block(received, numel_, *index_codec_, *values_, theirs);
        add_entries(result.sum, theirs, both);
        keep_k_largest(both, k, merge.dropped);
        merge.received = std::move(theirs.indices);
        std::swap(result.sum, both);
      }
      merges_.push_back(std::move(merge));
    }
  }

  // Brings rank 0's entries to all, and notes in lacks_ where they are without this rank's.
  void down(Communicator& communicator, SparseSum& result) {
    const int rank = communicator.rank(), ranks = communicator.size();
    std::vector<std::byte> block, message, received;
    lacks_.assign(rank == 0 ? result.sum.indices.size() : 0, 0);
    if (rank == 0 && ranks > 1) block = write_block(result.sum, numel_, *index_codec_, *values_);
    for (std::size_t round = merges_.size(); round-- > 0;) {
      const int reach = 1 << round;
      const bool receives = rank % (2 * reach) == reach, sends = is_parent(rank, reach, ranks);
      message.clear();
      if (sends) {
        mark(result.sum, merges_[round].dropped);
        message = write_message(result.sum, merges_[round].received, block);
      }
      exchange(communicator, sends ? rank + reach : -1, message, receives ? rank - reach : -1, received,
               result);
      if (receives) block = read_message(received, result.sum);
    }
  }

  static bool is_parent(int rank, int reach, int ranks) {
    return rank % (2 * reach) == 0 && rank + reach < ranks;
  }

  static void exchange(Communicator& communicator, int to, std::span<const std::byte> mine, int from,
                       std::vector<std::byte>& theirs, SparseSum& result) {
    communicator.send_receive(to, mine, from, theirs);
    result.bytes_sent += mine.size();
    result.bytes_received += theirs.size();
  }

  void mark(const SparseVector& sum, const std::vector<std::uint32_t>& dropped) {
    for_common(sum.indices, dropped, [&](std::size_t ordinal) { lacks_[ordinal] = 1; });
  }

  std::vector<std::byte> write_message(const SparseVector& sum, const std::vector<std::uint32_t>& received,
                                       const std::vector<std::byte>& block) const {
    std::vector<std::uint32_t> list(1);
    for_common(sum.indices, received, [&](std::size_t ordinal) {
      if (lacks_[ordinal]) list.push_back(static_cast<std::uint32_t>(ordinal));
    });
    list[0] = static_cast<std::uint32_t>(list.size() - 1);
    std::vector<std::byte> message(4 * list.size() + block.size());
    std::memcpy(message.data(), list.data(), 4 * list.size());
    std::memcpy(message.data() + 4 * list.size(), block.data(), block.size());
    return message;
  }

  // Returns the sum's block, for this rank's own children.
  std::vector<std::byte> read_message(std::span<const std::byte> message, SparseVector& sum) {
    std::uint32_t count = 0;
    if (message.size() < sizeof count) damaged_block("shorter than its list of dropped entries");
    std::memcpy(&count, message.data(), sizeof count);
    message = message.subspan(sizeof count);
    if (count > message.size() / 4) damaged_block("shorter than its list of dropped entries");
    std::vector<std::uint32_t> list(count);
    if (count > 0) std::memcpy(list.data(), message.data(), std::size_t{4} * count);
    message = message.subspan(std::size_t{4} * count);
    read_block(message, numel_, *index_codec_, *values_, sum);
    lacks_.assign(sum.indices.size(), 0);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i] >= lacks_.size() || (i > 0 && list[i] <= list[i - 1]))
        damaged_block("a list of dropped entries that does not fit the sum");
      lacks_[list[i]] = 1;
    }
    return {message.begin(), message.end()};
  }

  std::size_t numel_;
  const IndexCodec* index_codec_;
  const ValueCodec* values_;
  std::vector<Merge> merges_;        // by round, empty if this rank received nothing
  std::vector<std::uint8_t> lacks_;  // by entry of the sum: this rank's value, or its subtree's, is not in it
};

// A binomial tree of ceil(log2 P) rounds to rank 0, each of at most k entries of b bytes, and the same back:
// 2 ceil(log2 P) (alpha + k b beta). Shi et al. count the way to rank 0 only.
double gtopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return 2 * broadcast_cost(link, ranks, k * bytes_per_entry);
}

const bool gtopk_registered =
    collectives().add("gtopk", "a tree adds and keeps the k largest at each node (gTop-k)",
                      {make_as<SparseCollective, GTopK>, gtopk_cost});

}  // namespace
}  // namespace topknot
