#pragma once
// What the exchange (dist/exchange/exchange.h) drives: a GroupPipeline per group, and a StepExecution per rank for
// what concerns all groups. They know where gradients lie and what a wait is; the exchange knows when each call is
// due. Implementations:
//
//   dist/exchange/host_pipeline.h           gradients in host memory; collectives through the rank's queue
//   dist/exchange/cuda/device_exchange.cpp  gradients in GPU memory; kernels on two streams, joined by events
//   dist/exchange/cuda/staged_exchange.cpp  gradients in GPU memory, copied to a host pipeline and back

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "dist/exchange/exchange.h"
#include "dist/plan/merge_plan.h"

namespace topknot {

// One group on its way through a step. All calls come from the rank's compute thread, in this order; those of different
// groups interleave. An exception out of any of them leaves the step half done.
class GroupPipeline {
 public:
  virtual ~GroupPipeline() = default;

  // `info.weights` stays valid to the end of the step.
  virtual void begin_step(const StepContext& info) = 0;
  // The group's gradient is final. Both memories of `slice` stay the pipeline's until commit() or discard().
  virtual void encode(Slice slice) = 0;
  // Starts the collective. Called in the order of the groups, the same on all ranks.
  virtual void send() = 0;
  // All groups were sent: starts what send() has held back.
  virtual void flush() {}
  // Takes in what the collective has brought. True where the group needs one more round, whose collective has then been
  // started; all ranks return the same.
  virtual bool decode() = 0;
  // After the last decode: whether the contributions of all ranks were finite; the same on all ranks. True where only
  // the device knows.
  virtual bool finite() const { return true; }
  // Between decode() and commit(): whether this rank's own values were, as far as they tell.
  virtual bool own_values_finite() const { return true; }
  // Ends the group's step. True where the average lies in slice.residual, else it is in slice.gradient; the other memory
  // holds the residual.
  virtual bool commit() = 0;
  // Ends it with everything as before encode().
  virtual void discard() {}

  // What the average has in it already.
  virtual GradientForm form() const = 0;
  // Adds the group's bytes and entries of the step under way, or of the last one, as far as the host knows them.
  virtual void add_stats(ExchangeStats& stats) const = 0;
  // State beside the residual, between steps. May wait for a GPU.
  virtual void save(StateWriter& writer) const = 0;
  virtual void load(StateReader& reader) = 0;
};

// What the steps of a rank share, whatever the group: the agreement whether a step is finite, the device's part of a
// step's begin and end, and which calls may be captured in a graph.
class StepExecution {
 public:
  struct Agreed {
    bool commit = true;
    int bad_rank = -1;  // as StepResult::bad_rank
  };

  virtual ~StepExecution() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  // `group` outlives the pipeline; `index`: its place in the order of sending.
  virtual std::unique_ptr<GroupPipeline> make_pipeline(const Group& group, int index) = 0;

  virtual void begin_step(const StepContext&) = 0;
  virtual StepState step_state() = 0;  // as Exchange::step_state()
  // Whether a message leaves as soon as its group and those before it are complete; else all leave in
  // Exchange::communicate().
  virtual bool sends_early() const { return true; }
  // All groups were encoded. `loss`: as Exchange::complete().
  virtual void complete(const float* loss) = 0;
  // Before the sends and flushes of Exchange::communicate().
  virtual void begin_collectives() {}
  // After them: starts the collective that tells all ranks whether every loss was finite.
  virtual void submit_agreement() = 0;
  // After the first round of all groups was decoded: takes in what submit_agreement() has brought.
  virtual void receive_agreement() = 0;
  // After the last round. On a GPU the kernels of commit() decide, and the host lets every step commit.
  virtual Agreed agree(std::span<const std::unique_ptr<GroupPipeline>> pipelines) = 0;
  // Whether agree() knows the outcome.
  virtual bool decides_on_host() const { return true; }
  // After the last commit() or discard(). Adds its times to the result's.
  virtual void finish_step(StepResult& result) = 0;

  virtual Exchange::Capture capture() const { return Exchange::Capture::none; }
  // Of the last step; what Exchange::spans() and observe() say.
  virtual const std::vector<ExchangeSpan>& spans() const {
    static const std::vector<ExchangeSpan> none;
    return none;
  }
  virtual void observe(Exchange::Observer) {}
  // Waits for what still works on the pipelines' memory. Called before they are destroyed, also after an error.
  virtual void quiesce() noexcept = 0;
};

}  // namespace topknot
