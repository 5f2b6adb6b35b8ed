#pragma once
// Pipelines of gradients in host memory: the compressors of compress/compressor.h on the compute thread, collectives
// through the rank's queue.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "compress/codec/codec.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/group_pipeline.h"
#include "dist/exchange/host_sum.h"
#include "dist/sparse/hierarchical.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {

// The compressor of a group: the configured one, or for a dense group of a compressed method the one of
// compress.dense_values.
struct GroupCompressor {
  std::unique_ptr<Compressor> compressor;
  bool every_entry = false;  // a dense group in a value codec is sent whole
  double density(double of_step) const { return every_entry ? 1.0 : of_step; }
};
// `ranks`: that encode for themselves. Throws UserError where the options do not go together.
GroupCompressor make_group_compressor(const Group& group, const ExchangeOptions& options, int ranks);

// Throws UserError for an exchange.collective that is unknown or that the method's messages do not allow.
void check_collective(const ExchangeOptions& options);

// One collective under way. Until its ticket is done it belongs to the queue's thread.
struct PendingCollective {
  Message message;
  std::vector<std::vector<std::byte>> blocks;  // what came back, by rank
  CollectiveQueue::Ticket ticket = 0;
  int group = ExchangeSpan::kAgreement, round = 0;

  // Where a sparse collective carries the message: what it adds, and what comes back.
  SparseCollective* collective = nullptr;
  SparseVector weighted;
  const SparseVector* entries = nullptr;
  std::size_t k = 0;
  SparseSum sum;

  // What the queue runs.
  void run(Communicator& communicator, SumOrder order);
  // Once it has come back, of this rank; received: from the other ranks. As ExchangeStats says.
  std::uint64_t bytes_sent() const;
  std::uint64_t bytes_received(int rank) const;
  Round returned() const;
};

// What the host's pipelines share: the queue, the times of a step, and its spans.
struct HostStep {
  CollectiveQueue& queue;
  SumOrder order = SumOrder::ranks;
  Communicator* hosts = nullptr;  // carries the groups' messages in place of the queue's communicator
  std::int64_t number = 0;        // of the step that is being made, from 1, as errors name it
  std::vector<CollectiveQueue::Ticket> outstanding = {};
  std::vector<ExchangeSpan> spans = {};
  ExchangeStats times = {};  // only its times
  Exchange::Observer observer = {};

  void submit(PendingCollective& pending, CollectiveQueue::Job job);
  void wait(const PendingCollective& pending);
  // Returns the seconds.
  double note(ExchangeSpan::Kind kind, int group, int round, Clock::time_point begin, Clock::time_point end);
};

class HostPipeline final : public GroupPipeline {
 public:
  // Throws UserError where the options do not go together. `ranks`: that encode for themselves.
  HostPipeline(const Group& group, int index, const ExchangeOptions& options, int ranks, HostStep& step);

  void begin_step(const StepContext& info) override;
  void encode(Slice slice) override;
  void send() override;
  bool decode() override;
  bool finite() const override { return method_.compressor->finite(); }
  bool own_values_finite() const override;
  bool commit() override;
  void discard() override;
  GradientForm form() const override { return method_.compressor->form(); }
  void add_stats(ExchangeStats& stats) const override;
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

 private:
  const Group& group_;
  HostStep& step_;
  GroupCompressor method_;
  const IndexCodec* index_codec_ = nullptr;
  std::unique_ptr<SparseCollective> collective_;  // null: all_gather
  StepContext info_;
  Slice slice_;
  PendingCollective pending_;  // of the round under way
  std::uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

class HostExecution final : public StepExecution {
 public:
  // As Exchange's constructor for host memory.
  HostExecution(CollectiveQueue& queue, const ExchangeOptions& options);

  int rank() const override { return step_.queue.communicator().rank(); }
  int ranks() const override { return step_.queue.communicator().size(); }
  std::unique_ptr<GroupPipeline> make_pipeline(const Group& group, int index) override;
  void begin_step(const StepContext& info) override;
  StepState step_state() override { return {&parameters_, &status_}; }
  void complete(const float* loss) override;
  void submit_agreement() override { submit_flag(loss_finite_); }
  void receive_agreement() override { finite_losses_ = receive_flags(); }
  Agreed agree(std::span<const std::unique_ptr<GroupPipeline>> pipelines) override;
  void finish_step(StepResult& result) override;
  const std::vector<ExchangeSpan>& spans() const override { return step_.spans; }
  void observe(Exchange::Observer observer) override { step_.observer = std::move(observer); }
  void quiesce() noexcept override;

 private:
  // Every rank sends one byte; what comes back is by rank.
  void submit_flag(bool mine);
  std::vector<std::byte> receive_flags();

  const ExchangeOptions options_;
  StepParameters parameters_;
  StepStatus status_;
  HostStep step_;
  std::unique_ptr<Hierarchy> hierarchy_;  // null: every rank encodes for itself
  HostSum* held_ = nullptr;               // whose message waits for the sum inside the host
  PendingCollective agreement_;
  bool loss_finite_ = true;
  std::vector<std::byte> finite_losses_;
  Clock::time_point commit_begin_;
};

}  // namespace topknot
