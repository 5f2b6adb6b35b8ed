#pragma once
// One group on its way through a step: its compressor, what of it is under way, and what came back. The
// exchange (dist/exchange/exchange.h) decides when; here stands what a group's message, collective and decoding are.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {

struct ExchangeOptions;

// One collective under way. Until its ticket is done it belongs to the queue's thread.
struct PendingCollective {
  Message message;
  std::vector<std::vector<std::byte>> blocks;  // what came back, by rank
  CollectiveQueue::Ticket ticket = 0;
  int group = -1, round = 0;

  // Where a sparse collective carries the message: what it adds, and what comes back.
  SparseCollective* collective = nullptr;
  Entries<float> weighted;
  const Entries<float>* entries = nullptr;
  std::size_t k = 0;
  SparseSum sum;

  // What the queue runs.
  void run(Communicator& communicator, SumOrder order);
  // Once it has come back, of this rank; received: from the other ranks. As ExchangeStats says.
  std::uint64_t bytes_sent() const;
  std::uint64_t bytes_received(int rank, int ranks) const;
  Round returned() const;
};

// A group's compressor and the course of its step.
class GroupPipeline {
 public:
  // `compressing`: the method is not dense. Throws UserError where the options do not go together.
  GroupPipeline(const Group& group, int index, bool compressing, const ExchangeOptions& options, int ranks);

  void begin_step();
  // One parameter is ready. True where it was the last.
  bool ready() { return --pending_ == 0; }
  // The others will not come; what their gradients hold counts.
  void complete() { pending_ = 0; }
  bool is_complete() const { return pending_ == 0; }
  // Leaves the message in `pending`.
  void encode(Slice slice, StepInfo info);
  // What came back is in `pending`. True where the group asks for one more round, whose message is then there.
  bool decode();
  // The average, in the memory of either side of the slice.
  std::span<float> commit();
  void discard();
  std::size_t planned_bytes(double density) const;
  void save(StateWriter& writer) const;
  void load(StateReader& reader);

  const Group& group() const { return *group_; }
  Compressor& compressor() { return *compressor_; }
  const Compressor& compressor() const { return *compressor_; }

  PendingCollective pending;  // of the round under way
  std::span<float> average;   // of the last committed step

 private:
  const Group* group_;
  std::unique_ptr<Compressor> compressor_;
  std::unique_ptr<IndexCodec> index_codec_;
  std::unique_ptr<SparseCollective> collective_;  // null: all_gather
  std::size_t pending_ = 0;                       // parameters that are not ready
  bool every_entry_ = false;  // a dense group in a value codec: sent whole, whatever the density
};

}  // namespace topknot
