#pragma once
// The engine's step, written once for all devices: batches, forward, backward with the exchange in its hooks, clipping,
// agreement, update. CpuEngine (train/cpu_engine.cpp) runs it; CudaEngine (train/cuda/engine.cpp) also captures it in
// graphs and replays these.

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "nn/core/autograd.h"
#include "nn/core/device.h"
#include "nn/core/tensor.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "train/engine.h"
#include "train/plan/exchange_choice.h"
#include "train/recorder.h"
#include "train/trainer.h"

namespace topknot {

class StepEngine : public Engine {
 public:
  const ParameterArena& arena() const override { return arena_; }
  const ParameterStore& store() const override { return model_->store; }
  const std::vector<Group>& groups() const override { return exchange_->groups(); }
  Config effective_config() const override { return settled_.effective(config_); }
  double modelled_makespan() const override { return settled_.modelled_makespan(groups()); }

  void start_epoch(std::int64_t epoch, std::int64_t first_step) override;
  void step(const StepRequest& request) override;
  void all_reduce(std::span<double> sums) override;
  std::optional<Evaluation> evaluate(Split split, const EvaluationHook& hook) override;
  void check_parameters(const std::string& when) override;
  std::function<void()> state(RunState& state) override;
  void load_state(const RunState& state) override;
  std::string checksum() override;

 protected:
  enum class Phase { data, forward, backward, clip, update, metrics };
  using Work = std::function<void()>;

  // The current device is `device`. Collective.
  StepEngine(const RunInputs& inputs, Communicator& communicator, Device device);
  // From the derived class's constructor, which owns both.
  void attach(Exchange& exchange, Recorder& recorder) { exchange_ = &exchange, recorder_ = &recorder; }

  // What differs between devices. A step calls them from top to bottom; those from run() on may be captured in a graph.
  virtual void begin_step(
      const StepRequest& request) = 0;  // what a graph cannot do, batches on a GPU for one
  // Runs the three parts of a step in order.
  virtual void run(const Work& forward_and_backward, const Work& communicate, const Work& finish) = 0;
  virtual void in_phase(Phase, const Work& work) { work(); }  // for timing
  virtual void load_batch() {}                                // of the next micro-batch
  // Forward pass of micro-batch `part`: its loss, a scalar.
  virtual Variable forward(int part, ForwardContext& context) = 0;
  virtual void clipped(double) {}                     // this rank's gradient, at this norm
  virtual void record(const StepResult& result) = 0;  // for stats()
  struct HostCopy {
    std::span<const float> from;  // in the device's memory
    void* to;
  };
  // Carries the copies out, as the memory is now; returns what is left to do, as state() does.
  virtual std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) = 0;
  // Over this rank's samples of the set.
  virtual EvaluationSums evaluation_sums(Split split, const EvaluationHook& hook) = 0;

  ForwardContext forward_context() const;

  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  const int parts_;  // micro-batches per step
  std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  const ResolvedExchange settled_;
  const std::unique_ptr<Optimizer> optimizer_;
  Clip clip_;
  std::vector<float> weights_;  // aggregation weights by rank
  Tensor loss_;                 // this rank's of the step: the mean over its micro-batches
  double in_hooks_ = 0;         // seconds of the step's backward pass

 private:
  void forward_and_backward(std::int64_t step);
  void save_statistics();
  void restore_statistics_if_bad();
  void clip_local(std::span<Parameter* const> parameters, double max_norm);
  void finish_step();

  const DeviceBackend& backend_;
  const std::vector<std::span<float>>
      statistics_;          // batch norm's and recurrent states, which the forward pass moves
  Tensor kept_statistics_;  // as before this step; undefined if there are none
  Exchange* exchange_ = nullptr;
  Recorder* recorder_ = nullptr;
};

}  // namespace topknot
