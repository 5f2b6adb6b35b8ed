#pragma once
// A group of parameters on its way through a step: what its compressor makes of the gradient, and what a transport
// (dist/exchange/transport.h) brings back. The exchange (dist/exchange/exchange.h) knows when each call is due.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "dist/exchange/exchange.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {

// The compress.* options of a group: the configured ones, or for a dense group of a compressed method those of
// compress.dense_values. Throws UserError where they do not go with exchange.collective.
CompressOptions group_options(const Group& group, const ExchangeOptions& options);
// A dense group in a value codec is sent whole; else the density of the step holds.
double group_density(const Group& group, const ExchangeOptions& options, double of_step);

// Throws UserError for an exchange.collective that is unknown or that the method's messages do not allow.
void check_collective(const ExchangeOptions& options);

// An exception out of any function leaves the step half done.
struct Bucket {
  // Of a group whose compressor is the caller's; all_gather and sums carry its messages. `index`: the group's place in
  // the order of sending. The group outlives the bucket.
  Bucket(const Group& group, int index, std::unique_ptr<Compressor> compressor);
  // Of gradients in host memory. Throws UserError where the options do not go together. `ranks`: how many messages the
  // group has in a step; with exchange.ranks_per_host a host sends one.
  Bucket(const Group& group, int index, const ExchangeOptions& options, int ranks);

  // The group's gradient, in `slice`, is final. Both of its memories are the bucket's until commit() or discard().
  void encode(const StepContext& context);
  // Takes in what the collective has brought. True where the group needs one more round, whose message is there then;
  // all ranks return the same.
  bool decode(const Round& round);
  // Between decode() and commit(): whether this rank's own values were finite, as far as they tell.
  bool own_values_finite() const;
  // Ends the group's step. True where the average lies in slice.residual, else it is in slice.gradient; the other
  // memory holds the residual.
  bool commit();
  // Ends it with everything as before encode().
  void discard();

  // Adds the entries of the step under way, or of the last one, as far as the host knows them.
  void add_to(StepStatus& status) const;
  // State beside the residual, between steps. May wait for a GPU.
  void save(StateWriter& writer) const;
  void load(StateReader& reader);

  const Group& group;
  const int index;
  std::unique_ptr<Compressor> compressor;
  bool every_entry = false;                      // whatever the density of the step
  const IndexCodec* index_codec = nullptr;       // of the collective
  std::unique_ptr<SparseCollective> collective;  // null: all_gather

  // Of the step under way.
  std::size_t missing = 0;  // parameters that are not ready
  bool swaps = false;       // the average lies in the residual's memory; kept for the next step's graph
  Slice slice;
  Message message;
  int round = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // as StepReport says

  // Where a sparse collective carries the first round's message: what it adds, and what it brings back.
  bool adds_entries = false;
  SparseVector weighted;
  const SparseVector* entries = nullptr;
  std::size_t k = 0;
  SparseSum sum;
};

}  // namespace topknot
