#pragma once
// A rank's replica of the model: its weights and statistics, the batches that it is trained and evaluated on,
// and the forward and backward pass, for all devices. A StepRule follows (train/step.h).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "nn/core/autograd.h"
#include "nn/core/device.h"
#include "nn/core/tensor.h"
#include "nn/core/threads.h"
#include "train/evaluate.h"
#include "train/runner.h"

namespace topknot {

struct BuiltModel;
struct RunInputs;

class Replica {
 public:
  // On the runner's device, with the seed's first weights. The inputs and the runner must outlive this.
  Replica(const RunInputs& inputs, Communicator& communicator, Runner& runner);
  ~Replica();
  // Once, after the runner has made its exchange.
  void make_batches() {
    train_ = runner_.make_batches(*inputs_.data.train, *model_->module, true);
    parts_ = train_loader().batches_per_step();
    test_ = runner_.make_batches(*inputs_.data.test, *model_->module, false);
  }

  ParameterArena& arena() const { return arena_; }
  ParameterStore& store() const;
  const Loader& train_loader() const { return train_->loader(); }
  // This rank's loss of the step, the mean over its micro-batches; in the device's memory.
  float* loss() { return loss_.data(); }
  // PassCost::flops() of this start's first whole step; 0 before it, and if steps differ (recordings).
  double flops() const { return flops_; }

  // The epoch's length in steps.
  std::int64_t enter_epoch(std::int64_t epoch, const std::vector<Dealt>& dealt) {
    return (train_->enter_epoch(epoch, dealt) + parts_ - 1) / parts_;
  }
  void start_epoch(std::int64_t epoch, std::int64_t first_step);
  void await_batch() { train_->await(); }
  // The number of micro-batches in the step that begins: fewer in an epoch's last one.
  int begin_step();
  // Leaves the mean gradient of the step's micro-batches in the arena. `hook`: of the last backward pass.
  void forward_and_backward(std::int64_t step, const GradientHook& hook);

  // Batch norm's and recurrent states go back to those before the step, if it was bad; `status` null: it was.
  void restore_statistics_if_bad(const StepStatus* status);
  // Collective: batch norm's statistics of all ranks become one, by train.bn_stats.
  void bring_statistics_together(CollectiveQueue& queue);

  // This rank's sums over its share of the test set or the held-out set, with the weights of arena(). None if
  // the hook ended it. Recurrent states begin with zeros; training goes on from its own.
  std::optional<EvaluationSums> evaluate(Split split, const EvaluationHook& hook);

 private:
  ForwardContext forward_context(std::int64_t step, int part, const BatchView& batch) const;
  void warn_of_unused_parameters();  // also zeroes their gradients, as end_backward() would
  void save_statistics();

  const RunInputs& inputs_;
  const Config& config_;
  Communicator& communicator_;
  Runner& runner_;
  int parts_ = 1;                  // micro-batches per step, fewer in an epoch's last one
  int step_parts_ = 0;             // of the step under way
  std::int64_t batches_left_ = 0;  // of the epoch
  const std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  const DeviceBackend& backend_;
  Tensor loss_;
  // Batch norm's and recurrent states, which the forward pass moves; and, if any, as before this step.
  const std::vector<std::span<float>> statistics_;
  Tensor kept_statistics_;
  std::unique_ptr<Batches> train_, test_;
  bool counted_ = false;
  double flops_ = 0;
  SpinControl spin_control_;
};

}  // namespace topknot
