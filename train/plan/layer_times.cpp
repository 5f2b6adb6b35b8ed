#include "train/plan/layer_times.h"

#include <chrono>
#include <map>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"

namespace topknot {
namespace {

constexpr int kWarmUpPasses = 2, kTimedPasses = 7;  // passes
constexpr double kRate = 1e-12;  // of the updates: the weights stay what they are, and finite

}  // namespace

LayerTimes measure_layer_times(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass) {
  const auto model = build_model(config, data);
  ParameterArena& arena = model->store.arena();
  const auto optimizer = make_optimizer(optimizer_options(config), arena);
  LoaderOptions options = loader_options(config, data, true, rank, ranks);
  options.workers = 0;
  Loader loader(data, options);
  loader.start_epoch(0);

  std::map<const Parameter*, std::vector<double>> times;
  std::vector<const Parameter*> order;  // of the last pass; the same in all
  std::vector<double> data_s, forward_s, update_s;
  for (int pass = 0; pass < kWarmUpPasses + kTimedPasses; ++pass) {
    if (before_pass) before_pass();
    double data_time = 0, forward_time = 0, update_time = 0;
    Batch batch;
    {
      Stopwatch watch(data_time);
      if (!loader.next(batch)) {
        loader.start_epoch(0);
        TOPKNOT_CHECK(loader.next(batch), "an epoch without batches");
      }
    }
    arena.clear_gradients();
    const std::vector<std::int32_t> frames = output_frames(*model->module, batch);
    Variable loss;
    {
      Stopwatch watch(forward_time);
      ForwardContext context;
      context.frames = frames;
      context.seed = config.seed;
      context.step = static_cast<std::uint32_t>(pass);
      loss = batch_loss(model->forward(batch.images, context), view_of(batch, frames));
    }
    order.clear();
    Clock::time_point last = Clock::now();
    backward(loss, [&](Parameter& parameter) {
      const auto now = Clock::now();
      if (pass >= kWarmUpPasses)
        times[&parameter].push_back(std::chrono::duration<double>(now - last).count());
      order.push_back(&parameter);
      last = now;
    });
    arena.zero_unwritten_gradients();
    {
      Stopwatch watch(update_time);
      optimizer->update(0, arena.gradient(0, arena.size()), {pass, kRate});
    }
    if (pass < kWarmUpPasses) continue;
    data_s.push_back(data_time);
    forward_s.push_back(forward_time);
    update_s.push_back(update_time);
  }

  std::map<const Parameter*, double> ready;
  double sum = 0;
  for (const Parameter* parameter : order) ready[parameter] = sum += quantile(times[parameter], 0.5);
  LayerTimes result;
  for (const Parameter* parameter : arena.parameters()) {
    result.backward.push_back(quantile(times[parameter], 0.5));
    result.ready.push_back(ready[parameter]);
  }
  result.data_s = quantile(data_s, 0.5);
  result.forward_s = quantile(forward_s, 0.5);
  result.update_s = quantile(update_s, 0.5);
  return result;
}

}  // namespace topknot
