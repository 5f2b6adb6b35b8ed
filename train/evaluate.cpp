#include "train/evaluate.h"

#include <algorithm>

#include "nn/ops/loss.h"

namespace topknot {

void synchronize_statistics(const ParameterStore& store, const std::string& rule, CollectiveQueue& queue,
                            const Communicator& communicator) {
  if (rule == "local" || communicator.size() == 1) return;
  std::vector<Buffer*> statistics;
  for (const auto& buffer : store.buffers())
    if (!buffer->recurrent) statistics.push_back(buffer.get());
  if (statistics.empty()) return;
  std::vector<double> all;
  for (const Buffer* buffer : statistics) all.insert(all.end(), buffer->values.begin(), buffer->values.end());
  const double scale = rule == "mean" ? 1.0 / communicator.size() : 1.0;
  queue.run([&](Communicator& c) {
    if (rule == "mean")
      c.all_reduce(std::span<double>(all));
    else
      c.broadcast(std::as_writable_bytes(std::span<double>(all)), 0);
  });
  auto value = all.begin();
  for (Buffer* buffer : statistics)
    for (float& statistic : buffer->values) statistic = static_cast<float>(*value++ * scale);
}

Variable batch_loss(const Variable& output, const Batch& batch) {
  return batch.targets.defined() ? mean_squared_error(output, batch.targets)
                                 : softmax_cross_entropy(output, batch.labels);
}

void copy_statistics(const ParameterStore& store, std::vector<float>& to) {
  to.clear();
  for (const auto& buffer : store.buffers())
    to.insert(to.end(), buffer->values.begin(), buffer->values.end());
}

void restore_statistics(const std::vector<float>& from, ParameterStore& store) {
  auto at = from.cbegin();
  for (const auto& buffer : store.buffers()) {
    std::copy_n(at, buffer->values.size(), buffer->values.begin());
    at += static_cast<std::ptrdiff_t>(buffer->values.size());
  }
}

std::array<double, 3> evaluation_sums(BuiltModel& model, Loader& loader, const EvaluationHook& hook) {
  ForwardContext context;
  context.training = false;
  std::array<double, 3> sums{};
  loader.start_epoch(0);
  std::int64_t done = 0;
  for (Batch batch; hook(done, loader.steps_per_epoch()) && loader.next(batch); ++done) {
    const Variable output = model.module->forward(Variable(batch.images), context);
    const auto n = static_cast<double>(batch.losses());
    sums[0] += batch_loss(output, batch).value().data()[0] * n;
    sums[2] += n;
    if (loader.dataset().task() == Task::classification)
      count_correct(output.value(), batch.labels, &sums[1]);
  }
  return sums;
}

}  // namespace topknot
