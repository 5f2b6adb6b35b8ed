#pragma once
// exchange.collective: how the entries that the ranks selected become one sum. With `all_gather`, the
// default, every rank receives every block and adds them itself. A sparse collective adds on the way and
// keeps about k entries of the sum, so that its volume does not grow with the number of ranks; the entries
// that it drops return to the residuals. The two are different algorithms: the kept entries are the largest
// of a sum, not the sum of the largest. A collective is one file that registers itself, cost model included
// (docs/extending.md). coded_sum (dist/sparse/coded_sum.h) is for methods whose messages are sums of floats.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "compress/state.h"
#include "dist/comm/communicator.h"
#include "dist/comm/link.h"
#include "nn/base/registry.h"

namespace topknot {

struct SparseSum {
  // The same on all ranks. Not finite, and then empty, if any rank's entries were not or a sum overflowed.
  SparseVector sum;
  // Positions, ascending, of values that this rank sent and that `sum` does not contain.
  std::vector<std::uint32_t> rejected;
  // Payload, headers included. A message to one rank counts where it leaves and where it arrives; an
  // all_gather counts its own block once as sent, and the others' as received.
  std::uint64_t bytes_sent = 0, bytes_received = 0;
};

// One per group and rank. commit() or discard() ends each step; state changes at commit() only.
class SparseCollective {
 public:
  virtual ~SparseCollective() = default;
  // Collective. `mine`: this rank's entries, times its weight; `k`, the same on all ranks, how many entries
  // of the sum are kept (at most numel). Deterministic: the same bits on every rank and on every backend.
  // Throws CollectiveError, and Error for damaged blocks.
  virtual void sum(Communicator& communicator, const SparseVector& mine, std::size_t k,
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
      nullptr;  // of the positions; outlives the collective. Values are sent as fp32
};
struct CollectiveType {
  // Null for all_gather, whose blocks the exchange gathers and decodes itself.
  std::unique_ptr<SparseCollective> (*make)(const SparseCollectiveOptions&) = nullptr;
  // Modelled seconds of one sum of `k` entries per rank (dist/comm/link.h). Null: no model, so that
  // exchange.collective=auto never chooses it and no merge plan can be made for it.
  double (*cost)(const Link& link, int ranks, double k, double bytes_per_entry) = nullptr;
  bool of_sums = false;  // adds messages that are sums, by CodedSum, and no entries
};
Registry<CollectiveType>& collectives();
// Whether the collective of that name is of_sums; false for names that are not registered, such as auto.
bool codes_sums(const std::string& name);

// Seconds by the cost model of a registered collective. Throws UserError if it has none.
double collective_cost(const std::string& name, const Link& link, int ranks, double k,
                       double bytes_per_entry);

// The collective of least modelled time: all_gather if it is as fast as any other, else the first by name.
std::string cheapest_collective(const Link& link, int ranks, double k, double bytes_per_entry);

// Lists of entries, as sparse collectives add and cut them.

// a's and b's entries, a's value + b's where positions meet. Empty and not finite if a, b or a sum is not.
void add_entries(const SparseVector& a, const SparseVector& b, SparseVector& sum);

// Keeps the k entries of largest magnitude, of equals those of lower position; `dropped` gets the others'
// positions, ascending. A zero counts as any other value.
void keep_k_largest(SparseVector& entries, std::size_t k, std::vector<std::uint32_t>& dropped);

// The k-th largest of the magnitudes (k >= 1), or 0 if there are fewer. Reorders them.
float kth_largest(std::vector<float>& magnitudes, std::size_t k);

// A copy of a rank's entries: not finite, and then empty, if a value is not (a weight may have made it so).
void take_finite(const SparseVector& mine, SparseVector& copy);

}  // namespace topknot
