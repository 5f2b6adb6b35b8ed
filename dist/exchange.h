#pragma once
// Carries gradients from the backward pass to the averaged gradient: the moment the last parameter of a group is ready its
// group is encoded and its message queued; groups travel in a fixed order decided at construction. finish() waits for all
// of them, lets all ranks agree that the step is finite, and commits or discards (DESIGN, ideas 3 to 6).

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "dist/communicator.h"
#include "nn/core/parameter.h"

namespace topknot {

struct ExchangeOptions {
  CompressOptions compress;
  std::string scope = "group";  // compress.scope: over what k and the threshold are computed: model, group, tensor
  std::string merge = "all";    // exchange.merge: what travels together: none, all, size:BYTES
  bool ordered_sum = false;     // dist.ordered_sum; a compressed method sums its dense groups in rank order anyway
};

// One slice of the arena that travels as one message.
struct Group {
  std::size_t begin = 0, end = 0;  // elements of the arena
  bool compressed = false;         // false: averaged dense
  std::vector<Parameter*> parameters;
  std::size_t numel() const { return end - begin; }
};

// Where the time of a step went, in seconds; bytes and counts of this rank.
struct ExchangeStats {
  double encode = 0, communicate = 0, decode = 0;
  double exposed = 0;  // communication that the compute thread had to wait for
  std::uint64_t bytes_sent = 0;
  std::uint64_t selected = 0;  // entries sent in compressed groups
  double threshold = 0;        // of the last compressed group
};

struct StepResult {
  bool committed = false;  // false: some rank saw a NaN or Inf; nothing has changed and there is no average
  int bad_rank = -1;       // the first rank that did, where known
  ExchangeStats stats;
};

class Exchange {
 public:
  // The plan of groups depends on shapes and options alone, so it is the same on all ranks. Throws UserError for options
  // that contradict each other (scope model with another merge than all).
  Exchange(ParameterArena& arena, Communicator& communicator, ExchangeOptions options);
  ~Exchange();

  const std::vector<Group>& groups() const;

  // Bytes that a rank would upload in a step at this density, headers included, for --dry-run; dense groups at 4 bytes
  // an element, selected entries at their target count.
  std::uint64_t planned_bytes(double density) const;

  // Before the backward pass. `weights` as in StepInfo; empty means equal shards.
  void begin_step(std::int64_t step, double density, std::span<const float> weights = {});
  // The hook: this parameter's gradient is final. Encodes and sends the group that this completes. Where `hold` was
  // asked for (whole-model clipping), call ready() for all parameters after the backward pass instead.
  void ready(Parameter& parameter);
  // Ends the step. Parameters that were not ready are taken as they stand (the trainer has zeroed them). `local_finite`:
  // this rank's loss was finite.
  StepResult finish(bool local_finite);

  // The averaged gradient of a group after a committed step; valid until the next begin_step().
  std::span<float> averaged(const Group& group);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace topknot
