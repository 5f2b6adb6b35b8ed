// A collective in one file: rank 0's entries are sent to rank 1, which adds its own and sends the sum to rank
// 2, and so on; the last rank's sum is sent the same way back. Entries are added in rank order, so that all
// ranks get the same bits, and none is dropped.
#include "compress/codec/codec.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {
namespace {

class Chain final : public SparseCollective {
 public:
  explicit Chain(const SparseCollectiveOptions& options)
      : numel_(options.numel), positions_(options.index_codec), values_(&value_codecs().find("fp32")) {}

  void sum(Communicator& ranks, const SparseVector& mine, std::size_t, SparseSum& result) override {
    result.bytes_sent = result.bytes_received = 0;
    result.rejected.clear();  // every entry of every rank is in the sum
    take_finite(mine, result.sum);
    SparseVector theirs, both;
    for (int r = 1; r < ranks.size(); ++r)
      if (pass(ranks, r - 1, r, result, theirs)) {
        add_entries(theirs, result.sum, both);
        std::swap(result.sum, both);
      }
    for (int r = ranks.size() - 1; r > 0; --r)
      if (pass(ranks, r, r - 1, result, theirs)) std::swap(result.sum, theirs);
  }

 private:
  // Every rank makes every call of the communicator. True if this rank received.
  bool pass(Communicator& ranks, int from, int to, SparseSum& result, SparseVector& theirs) {
    const bool sends = ranks.rank() == from, receives = ranks.rank() == to;
    std::vector<std::byte> block, received;
    if (sends) block = write_block(result.sum, numel_, *positions_, *values_);
    ranks.send_receive(sends ? to : -1, block, receives ? from : -1, received);
    result.bytes_sent += block.size();
    result.bytes_received += received.size();
    if (receives) read_block(received, numel_, *positions_, *values_, theirs);
    return receives;
  }

  std::size_t numel_;
  const IndexCodec* positions_;
  const ValueCodec* values_;
};

std::unique_ptr<SparseCollective> make(const SparseCollectiveOptions& options) {
  return std::make_unique<Chain>(options);
}

// P - 1 messages one after the other there, of k, 2 k, ... entries if no positions coincide, and P - 1 of the
// whole sum back.
double cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  const double hops = ranks - 1, entries = hops * ranks / 2 + hops * ranks;
  return ranks < 2 ? 0 : 2 * hops * link.alpha + entries * k * bytes_per_entry * link.beta;
}

const bool chain_registered = collectives().add(
    "chain", "from rank to rank and back: the worked example of docs/extending.md", {make, cost});

}  // namespace
}  // namespace topknot
