#pragma once
// A device's own part of a step (train/step.h): its exchange and its batches, whether the step's
// parts run at once or as captured graphs, the clock that times them, and when the host knows what came of
// them. On a GPU the host is ahead: it puts steps on a stream and reads their outcome some steps later.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "train/batches.h"

namespace topknot {

struct RunInputs;

// A step's parts, in order. Graphs can capture compute and apply, and communicate by Exchange::capture().
struct StepParts {
  std::function<void()> compute, communicate, apply;
  const float* loss;  // of this rank, complete after compute; in the device's memory
};

class Runner {
 public:
  struct Traits {
    Device device;
    std::string name;              // "cpu", or the GPU's name
    std::int64_t steps_ahead = 1;  // that may be made whose reports were not asked for; the same on all ranks
    // On a GPU, the steps of the run's micro-batches, one number for each part: ForwardContext::gpu_step. Else null.
    const std::uint32_t* gpu_steps = nullptr;
  };

  virtual ~Runner() = default;
  const Traits& traits() const { return traits_; }

  // Before the first step, in this order and once each: make_exchange(), make_batches() for training,
  // begin_run(). make_batches() for evaluation at any time after the first. The runner must outlive them all.
  virtual std::unique_ptr<Exchange> make_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                  const ExchangeOptions& options) = 0;
  virtual std::unique_ptr<Batches> make_batches(const Dataset& dataset, const Module& model, bool train) = 0;
  virtual void begin_run(std::int64_t total_steps) = 0;

  // `parts`: micro-batches of the step. `awaited_s`: seconds that await() of the batches took.
  virtual void begin_step(const StepContext& context, int parts, double awaited_s) = 0;
  virtual void run(const StepParts& parts) = 0;
  // Times `work`. `hook`, in backward: recording, clipping of one tensor, the exchange, which times itself.
  enum class Phase { data, forward, backward, hook, clip, update, metrics, evaluate };
  virtual void in_phase(Phase phase, const std::function<void()>& work) = 0;
  // Completes the exchange's report, for reports(). `loss` as in run().
  virtual void end_step(const StepReport& report, const float* loss) = 0;

  // The oldest `count` reports that were not asked for, in order; waits for these steps alone.
  virtual std::vector<StepReport> reports(std::size_t count) = 0;

  struct HostCopy {
    std::span<const float> from;  // in the device's memory
    void* to;
  };
  // Carries the copies out, as the memory is now. Returns what is left to do, which any thread may call,
  // during further steps and before the next copy_to_host(); empty if nothing is.
  virtual std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) = 0;
  virtual void finish() = 0;  // waits for all steps, and closes what it writes
  // No further steps: what refers to the exchange or the arena goes, which come to their end after this.
  virtual void release() noexcept {}

 protected:
  Traits traits_;
};

std::unique_ptr<Runner> make_cpu_runner(const RunInputs& inputs, Communicator& communicator);
// UserError if the GPU, or what the configuration asks of it, cannot be had, as in builds without CUDA.
std::unique_ptr<Runner> make_cuda_runner(const RunInputs& inputs, Communicator& communicator);

// The index in arena.parameters() of the first whose gradient holds NaN or infinity; -1: none. On a CPU.
int first_bad_parameter(const ParameterArena& arena);

}  // namespace topknot
