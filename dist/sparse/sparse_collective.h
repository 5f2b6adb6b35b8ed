#pragma once
// exchange.collective: how the entries that the ranks selected become one sum. With `all_gather`, the default,
// every rank gets every block and adds them itself; nothing here is needed for it. A sparse collective adds on
// the way and keeps about k entries of the sum, so that its volume does not grow with the ranks; what it drops
// goes back to the residuals. That is another algorithm: the kept entries are the largest of a sum, not the sum
// of the largest. A new one is one file that registers itself.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/entries.h"
#include "compress/state.h"
#include "dist/comm/communicator.h"
#include "nn/core/base/registry.h"

namespace topknot {

// What one rank gets back.
struct SparseSum {
  // The same on all ranks. finite is false where any rank's entries were not, or a sum overflowed; there are
  // no entries then.
  Entries<float> sum;
  // Positions that this rank sent and whose values are not contained in `sum`, ascending: where the position
  // was dropped, or only other ranks' values made it.
  std::vector<std::uint32_t> rejected;
  // Payload, headers included. A message to one rank counts where it leaves and where it arrives; an
  // all_gather counts its own block once as sent, and the others' as received.
  std::uint64_t bytes_sent = 0, bytes_received = 0;
};

// One a group and rank. Carries what it learns from step to step; commit() and discard() end each step.
class SparseCollective {
 public:
  virtual ~SparseCollective() = default;
  // Collective. `mine`: this rank's entries, times its weight; `k`, the same on all ranks, how many entries of
  // the sum are kept (at most numel). Deterministic: the same bits on every rank and on every backend. Throws
  // CollectiveError, and Error for damaged blocks.
  virtual void sum(Communicator& communicator, const Entries<float>& mine, std::size_t k,
                   SparseSum& result) = 0;
  virtual void commit() {}
  virtual void discard() {}  // as before sum()
  // Between steps.
  virtual void save(StateWriter&) const {}
  virtual void load(StateReader&) {}
};

struct SparseCollectiveOptions {
  std::size_t numel = 0;  // of the group
  const IndexCodec* index_codec =
      nullptr;  // how positions travel; outlives the collective. Values travel as fp32
};
using SparseCollectiveFactory = std::unique_ptr<SparseCollective> (*)(const SparseCollectiveOptions&);
Registry<SparseCollectiveFactory>& sparse_collectives();

}  // namespace topknot
