#pragma once
// The groups of an exchange (dist/exchange/exchange.h) in a step, and what carries them to the other ranks
// and back: a Bucket is a group, a Transport knows where gradients lie and what a wait is. Transports:
//
//   HostTransport                            gradients in host memory; collectives through the rank's queue
//   dist/exchange/cuda/device_exchange.cpp   gradients in GPU memory; kernels on two streams, joined by events
//   dist/exchange/cuda/staged_exchange.cpp   gradients in GPU memory, copied to a host transport and back

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/comm/ordered_sum.h"
#include "dist/exchange/exchange.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/coded_sum.h"
#include "dist/sparse/hierarchical.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {

// The compress.* options of a group: the configured ones, or for a dense group of a compressed method those
// of compress.dense_values. Throws UserError if they do not go with exchange.collective.
CompressOptions group_options(const Group& group, const ExchangeOptions& options);
// The compressor of a group, or of its elements `own`, whose gradient is in host memory. `ranks`: how many messages
// these have in a step; with exchange.ranks_per_host a host sends one. Throws UserError if the options do not go
// together.
std::unique_ptr<Compressor> make_group_compressor(const Group& group, ElementRange own,
                                                  const ExchangeOptions& options, int ranks);
// A dense group in a value codec is sent whole; else the density of the step holds.
double group_density(const Group& group, const ExchangeOptions& options, double of_step);

// UserError for an exchange.collective that is unknown or does not fit the method or exchange.hierarchy.
void check_collective(const ExchangeOptions& options);
// Throws UserError if exchange.hierarchy is parts and the method's messages are not made of any part of a group.
void check_parts(const ExchangeOptions& options);

// A group of parameters on its way through a step: what its compressor makes of the gradient, and what a
// transport brings back. The exchange knows when each call is due. An exception leaves the step half done.
struct Bucket {
  // `own`: what of the group this rank encodes, and the compressor is made for. `index`: the group's place in the
  // order of sending. The group outlives the bucket. Throws UserError if the options do not go together.
  Bucket(const Group& group, ElementRange own, int index, const ExchangeOptions& options,
         std::unique_ptr<Compressor> compressor);

  // The group's gradient, in `slice`, is final where it is this rank's own. Both of its memories are the bucket's until
  // commit() or discard().
  void encode(const StepContext& context);
  // Takes in what the collective has brought. True, on all ranks, if there is a message of one more round.
  bool decode(const Round& round);
  // Between decode() and commit(): whether this rank's own values were finite, as far as they tell.
  bool own_values_finite() const;
  // Ends the group's step. True if the average lies in slice.residual, else it is in slice.gradient; the
  // other memory holds the residual. Both where they are this rank's own.
  bool commit();
  // Ends it with everything as before encode().
  void discard() {
    encoded = false;
    if (collective) collective->discard();
    compressor->discard();
  }
  // Between steps: multiplies what the rank still has to send, where the average divides by the number of ranks.
  void scale_memory(float factor, std::span<float> residual);

  // Adds the entries of the step under way, or of the last one, as far as the host knows them.
  void add_to(StepStatus& status) const;
  // State other than the residual, between steps. May wait for a GPU.
  void save(StateWriter& writer) const;
  void load(StateReader& reader);

  std::span<float> own_of(std::span<float> values) const { return values.subspan(own.begin, own.size()); }
  // After commit(): the average's memory, and the ranges of the residual's memory that are other ranks'.
  std::span<float> average() const { return swaps ? slice.residual : slice.gradient; }
  std::array<std::span<float>, 2> not_own() const {
    if (!swaps) return {};
    return {slice.gradient.first(own.begin), slice.gradient.subspan(own.end)};
  }

  const Group& group;
  const ElementRange own;
  const int index;
  std::unique_ptr<Compressor> compressor;
  bool every_entry = false;                      // whatever the density of the step
  bool divides_by_ranks = true;                  // the average; else by how many contribute
  const IndexCodec* index_codec = nullptr;       // of the collective
  std::unique_ptr<SparseCollective> collective;  // null: all_gather

  std::size_t missing = 0;  // parameters that are not ready
  bool encoded = false;     // and neither committed nor discarded
  bool swaps = false;       // the average lies in the residual's memory; kept for the next step's graph
  Slice slice;
  Message message;
  int round = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // as StepReport says

  // If a sparse collective carries the first round's message: what it adds, and what it brings back.
  bool adds_entries = false;
  SparseVector weighted;
  const SparseVector* entries = nullptr;
  std::size_t k = 0;
  SparseSum sum;
};

// One per rank. All calls come from the rank's compute thread, in the order of declaration; calls for
// different buckets interleave. The destructor waits for work on the buckets' memory, also after an error.
class Transport {
 public:
  // The same in every step.
  struct Traits {
    int rank = 0, ranks = 1;
    int encoders = 1;  // messages of a group in a step: by rank, or with exchange.ranks_per_host by host
    int parts = 1, part = 0;   // a group's parts, by ranks of a host, and which one this rank encodes
    bool counts_bytes = true;  // false on a rank that sends nothing to other hosts
    // Whether a group is encoded as soon as it is complete; else when it is sent.
    bool encodes_early = true;
    // Whether a message leaves once its group and those before are complete, not in Exchange::communicate().
    bool sends_early = true;
    // Whether agree() knows the outcome; else a commit's kernels decide, and the host commits every step.
    bool decides_on_host = true;
    Exchange::Capture capture = Exchange::Capture::none;
  };
  struct Agreed {
    bool commit = true;
    int bad_rank = -1;  // as StepStatus::bad_rank
  };
  using Work = std::function<void()>;

  virtual ~Transport() = default;
  const Traits& traits() const { return traits_; }
  bool hierarchical() const { return traits_.encoders != traits_.ranks; }
  const std::vector<ExchangeSpan>& spans() const { return spans_; }  // as Exchange::spans()
  void clear_spans() { spans_.clear(); }

  // Returns the step as compressors are given it: that of hosts, in the gradients' memory. `buckets`: those of the
  // step's groups, on a GPU all groups'; valid as long as this is used. Fills in the bytes that are known beforehand.
  virtual StepContext begin(const StepContext& context, std::span<Bucket> buckets) = 0;
  StepState step_state() const { return step_state_; }  // as Exchange::step_state()
  // Runs a piece of the compute thread's work, and notes its time as one of the bucket's.
  virtual void around(ExchangeSpan::Kind kind, const Bucket& bucket, const Work& work) = 0;

  // The gradient is final. Returns the memory that the bucket works in, whose contents are there for
  // start() and for an encoding that is run around().
  virtual Slice take(const Bucket&, Slice slice) { return slice; }
  // A bucket's collectives.
  // - message: of its message. Started in the order of the groups, the same on all ranks; of a further round in the same
  //   order as well.
  // - sum, if hierarchical(), among the ranks of a host, in the same order: turns the gradient into the host's, as
  //   Hierarchy::average().
  // - gather, with exchange.hierarchy=parts, among them too: clears the residual outside of this rank's part and gathers
  //   the other ranks' parts of a committed bucket's average.
  enum class Leg { message, sum, gather };
  virtual void start(Leg leg, Bucket& bucket) = 0;
  // Waits for the collective. Returns a message's result, valid until the next start().
  virtual Round wait(Leg leg, Bucket& bucket) = 0;

  // All groups are complete. `loss`: as Exchange::end_backward().
  virtual void take_loss(const float* loss) = 0;
  // After all first rounds were started: starts the collective that tells all ranks whether every loss was finite.
  virtual void start_agreement() = 0;
  // After the last round: takes in what that has brought. The same on all ranks.
  virtual Agreed agree(std::span<const Bucket> buckets) = 0;
  // The bucket was committed, and its average is whole. Returns whether the arena's memories swap.
  virtual bool committed(const Bucket&, bool in_residual) { return in_residual; }
  // After the last commit or discard. Fills in its times.
  virtual void finish(StepReport& report) = 0;

  // After an exception: waits for what still works on the buckets' memory.
  virtual void quiesce() noexcept {}

  // As Exchange::when_agreement_fails() and last_agreement().
  AgreementSource recover_agreement;
  Agreement agreement;

  // Between steps, where residuals do not lie in the arena: copies the bucket's there, or from there.
  virtual void copy_residual(const Bucket&, [[maybe_unused]] bool to_arena) {}

 protected:
  Traits traits_;
  StepState step_state_;
  std::vector<ExchangeSpan> spans_;
};

class HostTransport : public Transport {
 public:
  // Throws as Exchange's constructor for host memory.
  HostTransport(CollectiveQueue& queue, const ExchangeOptions& options);
  ~HostTransport() override { quiesce(); }

  StepContext begin(const StepContext& context, std::span<Bucket> buckets) override;
  void around(ExchangeSpan::Kind kind, const Bucket& bucket, const Work& work) override;
  void start(Leg leg, Bucket& bucket) override;
  Round wait(Leg leg, Bucket& bucket) override;
  void take_loss(const float* loss) override { loss_finite_ = !loss || std::isfinite(*loss); }
  void start_agreement() override { submit_flag(loss_finite_); }
  Agreed agree(std::span<const Bucket> buckets) override;
  void finish(StepReport& report) override;

  void quiesce() noexcept override;  // the jobs of the queue

 protected:
  StepStatus status_;  // of the last step

 private:
  using Ticket = CollectiveQueue::Ticket;

  // Until its ticket is done, what a job works on belongs to the queue's thread.
  Ticket submit(CollectiveQueue::Job job) {
    outstanding_.push_back(queue_.submit(std::move(job)));
    return outstanding_.back();
  }
  void wait_for(Ticket ticket, int group, int round);
  void start_inside(Leg leg, Bucket& bucket);
  void run(Bucket& bucket, Communicator& communicator);
  static void scatter(const Message& message, Communicator& communicator, Blocks& brought);
  std::uint64_t bytes_received(const Bucket& bucket) const;
  double note(ExchangeSpan::Kind kind, int group, int round, Clock::time_point begin, Clock::time_point end) {
    spans_.push_back({kind, group, round, begin, end});
    return std::chrono::duration<double>(end - begin).count();
  }
  // Every rank sends one byte; what comes back is by rank.
  void submit_flag(bool mine);
  std::vector<std::byte> receive_flags();
  std::vector<std::byte> receive_agreement();
  // found_ becomes what all ranks of the host found in their parts.
  void join_hosts_statuses();

  CollectiveQueue& queue_;
  const SumOrder order_;
  const bool codes_sums_;                 // the messages that are sums
  const bool same_inside_;                // ExchangeOptions
  CodedSum coded_sum_;                    // the queue's thread has it
  std::unique_ptr<Hierarchy> hierarchy_;  // null: every rank encodes for itself
  std::vector<Ticket> outstanding_;

  // One per group.
  struct Collective {
    Ticket inside = 0, message = 0;  // inside the host; of the round under way
    Blocks blocks;                   // what came back, by rank
    std::vector<std::span<const std::byte>> views;
    CodedSum::Bytes coded;  // of a coded sum
  };
  std::vector<Collective> collectives_;

  StepParameters parameters_;
  StepStatus found_;         // of parts
  std::int64_t number_ = 0;  // from 1, as errors name it
  int rank_ = 0;             // among those that encode for themselves
  StepSeconds times_;
  bool loss_finite_ = true;
  std::vector<std::byte> flag_;  // this rank's, on its way
  Blocks flags_;
  Ticket flag_ticket_ = 0;
  Clock::time_point commit_begin_;
  Clock::duration gathering_{};  // of parts: among the commits, in the gathers
};

}  // namespace topknot
