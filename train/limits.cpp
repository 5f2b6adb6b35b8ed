#include "train/limits.h"

#include <fmt/format.h>

#include "nn/core/base/memory.h"
#include "nn/core/base/text.h"

namespace topknot {
namespace {

double data_bytes(const Dataset& data) {
  if (data.task() == Task::language_model) return sizeof(std::int32_t) * static_cast<double>(data.size());
  if (data.on_demand()) return 0;
  const double values = static_cast<double>(data.sample_shape().numel());
  return static_cast<double>(data.size()) * (data.size() > 0 && data.bytes(0) ? values : 4 * values);
}

}  // namespace

double batches_bytes(const Config& config, const Dataset& data) {
  const double batch = 4.0 * static_cast<double>(data.sample_shape().numel()) * config.data.batch_size;
  return (config.data.workers > 0 ? LoaderOptions().prefetch : 1) * batch;
}

double model_bytes(const Config& config, const Dataset& data) {
  if (parse_device(config.train.device).kind != DeviceKind::cpu) return 0;
  const double moments = config.optimizer.name == "adamw" ? 2 : config.optimizer.momentum > 0 ? 1 : 0;
  return 4 * (3 + moments) * static_cast<double>(build_model(config, data)->store.arena().size());
}

void check_limits(const Config& config, const RunData& data, int ranks, int processes) {
  const double workers = config.data.workers;
  // Training and evaluation have workers each; then the rank's own, its compute threads and the collectives' one.
  const double threads = ranks * (2 * workers + compute_threads(config) + 1);
  if (threads > thread_limit())
    throw UserError(
        fmt::format("dist.ranks: {} with data.workers={} need {:.0f} threads, and this machine allows {:.0f} "
                    "(ulimit -u, the kernel or the container); lower either",
                    count_text(ranks, "rank"), config.data.workers, threads, thread_limit()));

  const double batches = batches_bytes(config, *data.train);
  const double model = model_bytes(config, *data.train);
  const double samples = data_bytes(*data.train) + data_bytes(*data.test);
  const double all = ranks * (model + batches) + processes * samples;
  if (all > memory_limit())
    throw UserError(fmt::format(
        "dist.ranks: {} on this machine, which has {} of memory, would need {} or more: {} of weights, "
        "gradients and "
        "momenta and {} of batches per rank, {} of samples per process; lower dist.ranks, data.batch_size or "
        "data.train_size, or take a smaller model",
        count_text(ranks, "rank"), format_bytes(memory_limit()), format_bytes(all), format_bytes(model),
        format_bytes(batches), format_bytes(samples)));
}

}  // namespace topknot
