#include "train/plan/step_cost.h"

#include <algorithm>

#include "dist/comm/backend.h"
#include "dist/comm/collective_queue.h"
#include "nn/core/pass_cost.h"
#include "train/evaluate.h"

namespace topknot {
namespace {

constexpr int kMostSamples = 4;  // of a counted pass

struct Pass {
  double forward = 0, backward = 0;  // operations
  double peak = 0;                   // bytes
};

Pass count_pass(const Config& config, const Dataset& data, BuiltModel& model, int samples,
                const GradientHook& hook) {
  LoaderOptions options = loader_options(config, data, true, 0, 1);
  options.batch_size = samples;
  options.workers = 0;
  Loader loader(data, options);
  loader.start_epoch(1);  // the first may be of short recordings
  Batch batch;
  loader.next(batch);
  model.store.arena().clear_gradients();
  const PassCost cost;
  const std::vector<std::int32_t> frames = output_frames(*model.module, batch);
  ForwardContext context;
  context.frames = frames;
  const Variable loss = batch_loss(model.forward(batch.images, context), view_of(batch, frames));
  Pass pass;
  pass.forward = cost.flops();
  backward(loss, hook);
  pass.backward = cost.flops() - pass.forward;
  pass.peak = static_cast<double>(cost.peak_bytes());
  return pass;
}

}  // namespace

StepCost count_step_cost(const Config& config, const Dataset& data, BuiltModel& model,
                         const ExchangeOptions& options) {
  StepCost cost;
  ParameterArena& arena = model.store.arena();
  for (const auto& buffer : make_optimizer(config.optimizer, arena)->state())
    cost.optimizer += static_cast<double>(buffer.size_bytes());

  const auto group = make_thread_group(1, config.dist.timeout_s);
  CollectiveQueue queue(*group[0]);
  Exchange exchange(arena, queue, options);
  exchange.begin_step(0, density_at_epoch(config, 0), {}, config.optimizer.lr);
  const int batch = config.data.batch_size, most = std::min(batch, kMostSamples);
  const Pass small = count_pass(config, data, model, 1, {});
  const Pass large =
      count_pass(config, data, model, most, [&](Parameter& parameter) { exchange.ready(parameter); });
  exchange.finish(true);
  cost.method = static_cast<double>(exchange.state().size());

  const double samples = batch, steps = config.train.accumulate;
  cost.forward_flops = steps * samples / most * large.forward;
  cost.backward_flops = steps * samples / most * large.backward;
  cost.activations = large.peak;
  if (most > 1) cost.activations += (samples - most) * (large.peak - small.peak) / (most - 1);
  return cost;
}

}  // namespace topknot
