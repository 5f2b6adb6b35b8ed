#pragma once
// A step's input and its results. Parameters and status lie in the memory of the device that computes the
// step: on a GPU, kernels and captured graphs run without the host.

#include <cstdint>
#include <limits>

namespace topknot {

// Values that change from step to step; written before the step, or the graph of a step, starts.
struct StepParameters {
  std::int64_t step = 0;        // 0-based; skipped steps count
  double lr = 1.0;              // learning rate
  double gradient_scale = 1.0;  // the optimizer's: a clip factor; 1 changes no bit
  double density = 1.0;         // of this step, in (0, 1]
  std::int32_t rank = 0;
};

// Results of a step; cleared before the step.
struct StepStatus {
  std::uint32_t bad = 0;  // 1: some rank's gradient, or a sum, was not finite; the same on all ranks
  // The first rank of which that is known, the same on all ranks: a dense sum does not tell whose NaN it
  // holds. Where only gradients show it, a host of several ranks is named by its first. On GPUs whose groups are all
  // dense, of a loss that is not finite, the rank itself alone has its number here.
  std::int32_t bad_rank = -1;
  // This rank's figures, or with exchange.hierarchy=parts its host's.
  std::uint64_t selected = 0;       // entries sent, over all groups
  std::uint64_t over_capacity = 0;  // entries selected and kept back
  double threshold = 0;             // of the last compressed group; of several ranks the least
};

// The part of the optimizer's rule that a gradient already contains.
enum class Applied {
  nothing,        // the averaged gradient
  momentum,       // before the average (DGC); the optimizer's own momentum is for weight decay
  learning_rate,  // before the average (LAGS-SGD)
};

// A rank's times in a step, in seconds; NaN if not measured.
struct StepSeconds {
  double data_s = 0, forward_s = 0;
  double backward_s = 0;  // without its hooks
  double encode_s = 0;
  double communicate_s = 0;  // inside the collectives, waiting for slower ranks included
  double decode_s = 0;       // commit included, which writes the average
  double update_s = 0;
  double exposed_s = 0;  // communication that the compute thread had to wait for
  // From the (last) backward pass's start to the end of the last group's first collective.
  double makespan_s = 0;

  static StepSeconds unknown() {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    return {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};
  }
  // The times that an exchange measures for itself; the rest is unknown.
  StepSeconds of_exchange() const {
    StepSeconds known = unknown();
    known.encode_s = encode_s, known.communicate_s = communicate_s;
    known.decode_s = decode_s, known.exposed_s = exposed_s;
    return known;
  }
  StepSeconds& operator+=(const StepSeconds& other) {
    data_s += other.data_s, forward_s += other.forward_s, backward_s += other.backward_s;
    encode_s += other.encode_s, communicate_s += other.communicate_s, decode_s += other.decode_s;
    update_s += other.update_s, exposed_s += other.exposed_s, makespan_s += other.makespan_s;
    return *this;
  }
};

// A rank's report of a step. The exchange fills in the status, the bytes and its own times, the runner
// (train/runner.h) the rest. On a GPU the kernels write loss and status, which the host reads later.
struct StepReport {
  double loss = 0;    // the mean over this rank's micro-batches
  StepStatus status;  // where bad, nothing has changed and there is no average
  // Messages of all groups and rounds, headers included, as payload: an all-reduce counts its length once.
  // The one byte of the agreement is not counted. With hosts of several ranks: what is sent between hosts, by
  // the first rank of each, 0 on the others; with exchange.hierarchy: parts by all of them.
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;  // the same, from all other ranks
  int bad_parameter = -1;            // of a bad step: first_bad_parameter(), here
  StepSeconds times;
  double seconds = 0;  // from the end of the step before, by the clock of a GPU; 0: by the host's

  bool committed() const { return status.bad == 0; }
};

struct StepState {
  StepParameters* parameters = nullptr;
  const StepStatus* status = nullptr;  // null: nothing is bad
};

}  // namespace topknot
