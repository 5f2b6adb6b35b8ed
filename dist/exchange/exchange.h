#pragma once
// Carries gradients from the backward pass to the averaged gradient. The exchange is the only scheduler of a
// step: it knows which group is complete, in which order groups are sent, and when all of them are committed
// or discarded. What a group's compressor does is in its Bucket (dist/exchange/transport.h); where gradients
// lie and how a collective is waited for is the business of the Transport (dist/exchange/transport.h). A
// step, on every rank:
//
//   begin_step()
//   ready(parameter) ...   in the hook: encodes the group that this completes, and starts its collective
//   end_backward(loss)     encodes the groups with parameters that were not ready
//   communicate()          starts the collectives that have not been, and the agreement of the ranks
//   decode_and_commit()    decodes, lets all ranks agree that the step is finite, commits or discards
//   end_step()             swaps the memories of the slices
//
// Groups are sent in a fixed order that is decided at construction. With exchange.ranks_per_host the
// gradients of a host's ranks are summed first, and the sum is encoded; while the host sums one group, the
// message of the group before is encoded: sum 0, sum 1, message 0, sum 2, message 1, ...; the last one leaves
// in communicate(). With exchange.hierarchy: parts a rank encodes, sends and commits its part of each group, and
// the parts of the averages are gathered after the commits. With one rank the way is the same. On a GPU the
// host enqueues all of it without waiting, and ready() to decode_and_commit() can be captured in graphs. An
// exception out of any of these leaves the step half done: the rank gives up (Communicator::abort) and ends.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "compress/compressor.h"
#include "compress/state.h"
#include "dist/plan/merge_plan.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"

namespace topknot {

class CollectiveQueue;

// Section `exchange` of a configuration.
struct ExchangeKeys {
  // How parameters are merged into groups (dist/plan/merge_plan.h).
  std::string merge = "all";
  // The plan of a merge rule that measures, parameters per group in arena order; or empty.
  std::vector<int> groups = {};
  // all_gather; or a sparse collective (dist/sparse/sparse_collective.h), which needs a method that sends
  // entries with values as they are; or coded_sum, which needs one whose messages are sums.
  std::string collective = "all_gather";
  // So many neighbouring ranks sum their gradients dense, and a host of them compresses as one rank does
  // (dist/sparse/hierarchical.h). Must divide the ranks; 0 and 1: no hierarchy. Not for plain sums of gradients.
  int ranks_per_host = 0;
  // Whether each rank of a host encodes the whole sum, and its first rank sends it (leader), or each a part (parts).
  std::string hierarchy = "leader";
  // Parts of the model that take turns, a step each (begin_step()); groups do not cross their borders.
  int fragments = 1;
};

// Keys of section `compress` that hold for all groups and every method.
struct CompressKeys {
  std::string scope = "group";  // over what k and the threshold are computed: model, group, tensor
  // How the dense groups of a compressed method are sent. fp32: summed as they are; another value codec:
  // gathered in it, and its error is carried to the next step.
  std::string dense_values = "fp32";
};

struct ExchangeOptions : ExchangeKeys, CompressKeys {
  CompressOptions compress = {};
  // dist.ordered_sum; a compressed method sums its dense groups in rank order anyway.
  bool ordered_sum = false;
  // With ranks_per_host: the ranks of a host have the same gradients, which need no sum inside it.
  bool same_inside = false;
  // compress.layer_density: densities by parameter name, which hold where they exceed the step's; or empty.
  std::map<std::string, double> layer_density = {};

  bool compressing() const { return !sums_plainly(compress.name, compress.values); }
  // Whether the ranks of a host sum their gradients first. Throws UserError if the method is dense.
  bool hierarchical(int ranks) const;
  bool in_parts() const { return ranks_per_host > 1 && hierarchy == "parts"; }
};

// The groups of an exchange with these options, in the order in which they are sent. Throws UserError for an
// unknown method and for options that contradict each other (scope model with another merge than all).
std::vector<Group> plan_groups(const ParameterArena& arena, const ExchangeOptions& options);

// Bytes that a rank would upload in a step at this density, headers included, as far as counts are known
// beforehand; of coded sums as if they were not coded. `ranks`: how many messages a group has in a step; with
// exchange.ranks_per_host a host sends one, or one for each part, counted together. UserError as Exchange.
std::uint64_t planned_bytes(const ParameterArena& arena, const ExchangeOptions& options, int ranks,
                            double density);

// One piece of a step's course, for profiles and traces.
struct ExchangeSpan {
  enum class Kind {
    encode,       // on the compute thread
    communicate,  // concurrently with it if the communicator overlaps
    decode,       // on the compute thread, the commit not included
    wait,         // the compute thread waits for a collective; none if collectives do not overlap
    commit,       // all groups
  };
  static constexpr int kInsideHost = -1;  // as a round: the dense sum of a host's ranks, and what they gather
  static constexpr int kAgreement =
      -1;  // as a group: the byte that says whether the step is finite; the commit
  Kind kind = Kind::encode;
  int group = kAgreement;
  int round = 0;
  std::chrono::steady_clock::time_point begin, end;
};

// What the ranks have agreed on about a step: a byte from each, by rank, 0 if its loss was not finite.
struct Agreement {
  std::int64_t step = 0;  // from 1; 0: none yet
  std::vector<std::byte> flags;
};
// The flags of a step, from another rank that has received them; empty if none has.
using AgreementSource = std::function<std::vector<std::byte>(std::int64_t step)>;

struct Bucket;
class Transport;

class Exchange {
 public:
  // For an arena in host memory. The plan of groups depends on shapes and options alone, so it is the same on
  // all ranks. Throws UserError for options that contradict each other. Arena and queue must outlive the
  // exchange. Collective if ranks_per_host is above 1, and so is the destructor.
  Exchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options);
  // Waits for the collectives under way, which the queue's own deadline bounds.
  virtual ~Exchange();

  // In the order in which they are sent: arena order, about the order in which backward finishes them.
  const std::vector<Group>& groups() const { return groups_; }

  // Before the backward pass; not part of a graph. Of `step` are used: step, density, weights in host memory
  // (empty: equal shards), and lr, which a method needs that applies it itself (compress.lr_inside). Only the groups
  // of this fragment take part: their parameters are ready(), and what is asked of groups below is asked of them.
  void begin_step(const StepContext& step, int fragment = 0);
  // Those of the step under way, or of the last one.
  std::span<const Group> groups_in_step() const;
  // Parameters and status of the step, in the arena's kind of memory, at the same place in every step:
  // written by begin_step(), and by decode_and_commit().
  StepState step_state();
  // The hook: this parameter's gradient is final. Encodes the group that this completes, and starts the
  // collective of every complete group that no earlier group holds back. For clipping over the whole model,
  // call it for all parameters after the backward pass and the clipping, in any order.
  void ready(Parameter& parameter);
  // Parameters that were not ready join the step as they stand; those that no backward pass wrote to are
  // zeroed first. `loss`: this rank's, one float in the arena's kind of memory, or null; where it is not
  // finite all ranks discard the step.
  void end_backward(const float* loss);
  void communicate();
  void decode_and_commit();
  // Whether the step was committed, from decode_and_commit() on. On a GPU true: its kernels read StepStatus.
  bool committed() const { return committed_; }
  // Not part of a graph. All ranks get the same committed() and bad_rank; on a GPU only the bytes are known.
  StepReport end_step();
  // end_backward() to end_step(). `local_finite`: this rank's loss was finite. For arenas in host memory.
  StepReport finish(bool local_finite);

  // The averaged gradient of a group, from decode_and_commit() of a committed step to the next begin_step();
  // in the arena's memory. May be changed in place (clipping).
  std::span<float> averaged(const Group& group);
  // The parts of the update rule that averaged() contains already, for Optimizer::update().
  Applied applied(const Group& group) const;

  // How much of a step a graph may capture. whole: all from ready() to decode_and_commit(). parts: ready() to
  // end_backward() in one graph and decode_and_commit() in another, with communicate() between them outside
  // of graphs in every step (threads, whose ranks meet on the host, or an NCCL that is kept out); ready()
  // then starts no collective. none: nothing.
  enum class Capture { none, parts, whole };
  Capture capture() const;
  // A number that changes whenever what a graph has captured is out of date (a density, a slice's memory).
  std::uint64_t capture_key() const;

  // The last step by kind and group, in the order of ends; valid until the next begin_step(). Empty on a GPU.
  const std::vector<ExchangeSpan>& spans() const;
  void clear_spans();  // of a step that exchanges nothing

  // Called for each compressed group once it is encoded, with its accumulated gradient, if the method has
  // one; for studies. Not called where gradients stay on a GPU.
  using Observer = std::function<void(const Group& group, std::span<const float> accumulated)>;
  void observe(Observer observer) { observer_ = std::move(observer); }

  // Called for each group once all its gradients are final, before any reader; may change them (clipping).
  using GroupHook = std::function<void(const Group& group)>;
  void when_complete(GroupHook hook) { when_complete_ = std::move(hook); }

  // For runs that go on without ranks that have died, in host memory and with methods of one round.
  // - A step whose flags do not arrive is committed or discarded by those of `source`, if that has them. Nothing can be
  //   exchanged afterwards.
  // - last_agreement(): of the last step whose flags this rank has.
  // - abandon(): if begin_step() to end_step() have thrown CollectiveError, everything is as before begin_step(). Returns
  //   whether that was so.
  // - scale_memory(): between steps, multiplies residuals and velocities, so that what a rank still has to send weighs as
  //   much with another number of ranks. Those whose average divides by the contributors stay as they are.
  void when_agreement_fails(AgreementSource source);
  const Agreement& last_agreement() const;
  bool abandon();
  void scale_memory(float factor);

  // The compressors' state, of this rank, for checkpoints; the residuals are the arena's. Between steps;
  // waits for a GPU, but for the long lists of its memory if `later` takes these. If residuals of GPU
  // gradients lie in host memory, state() also writes them to the arena's, and load_state() takes them from
  // there.
  std::vector<std::byte> state(std::vector<DeviceFloats>* later = nullptr) const;
  // Throws Error if the bytes are damaged, or of another method or plan.
  void load_state(std::span<const std::byte> bytes);

 protected:
  // `groups`: plan_groups() of this arena. `compressors`: by group; empty: those of gradients in host memory.
  Exchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<Transport> transport,
           const ExchangeOptions& options, std::vector<std::unique_ptr<Compressor>> compressors = {});

 private:
  struct Place {
    std::size_t group;
    bool ready;
  };
  Slice slice(const Group& group) const {
    return {arena_.gradient(group.begin, group.end), arena_.residual(group.begin, group.end)};
  }
  void gradient_ready(Bucket& bucket);
  void start(Bucket& bucket);
  void encode(Bucket& bucket);
  void encode_host_sum(Bucket& bucket);
  bool decode(Bucket& bucket);
  StepReport report() const;
  const Bucket& bucket_of(const Group& group) const;

  ParameterArena& arena_;
  const std::vector<Group> groups_;
  std::vector<Bucket> buckets_;                 // as the groups
  const std::unique_ptr<Transport> transport_;  // ends before the buckets, on whose memory it works
  std::span<Bucket> active_;                    // of the step's fragment
  Observer observer_;
  GroupHook when_complete_;
  std::unordered_map<const Parameter*, Place> places_;
  std::vector<float> weights_;
  StepContext context_;  // as compressors are given it
  // With ranks_per_host: whose host's sum is under way, to be encoded with the next one's, or last.
  Bucket* deferred_ = nullptr;
  std::size_t next_to_start_ = 0;
  bool in_step_ = false;
  // The current step's, or the last one's.
  StepReport report_;
  bool committed_ = false;
  double density_ = 0;
  std::uint64_t densities_ = 0;  // how often the density has changed
};

}  // namespace topknot
