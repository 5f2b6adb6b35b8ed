#include "train/limits.h"

#include <fmt/format.h>

#include <algorithm>

#include "nn/base/memory.h"
#include "nn/base/text.h"
#include "train/checkpoint/model_file.h"

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
  double floats = 0;
  const auto model = register_model(config, data);
  for (const auto& parameter : model->store.parameters())
    floats += (matches_any(config.model.freeze, parameter->name()) ? 1 : 3 + moments) *
              static_cast<double>(parameter->numel());
  return 4 * floats;
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

  // A process that is started is as large as this one, samples included, when it begins.
  const double stacks = threads / processes * stack_bytes();
  const double more = ranks / processes * (model + batches) + stacks;
  if (more > address_room())
    throw UserError(fmt::format(
        "out of memory: the process needs {} or more of address space beside what it has ({} of weights, "
        "gradients and momenta, {} of batches, {} of the stacks of threads), and the limit (ulimit -v or -d) "
        "leaves {}; raise the limit, or lower dist.ranks, data.workers, data.batch_size or train.threads",
        format_bytes(more), format_bytes(ranks / processes * model),
        format_bytes(ranks / processes * batches), format_bytes(stacks),
        format_bytes(std::max(0.0, address_room()))));
}

}  // namespace topknot
