#include "train/evaluate.h"

#include <algorithm>
#include <array>

#include "data/speech.h"
#include "nn/ops/ops.h"

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
      sum_doubles(c, all);
    else
      c.broadcast(std::as_writable_bytes(std::span<double>(all)), 0);
  });
  auto value = all.begin();
  for (Buffer* buffer : statistics)
    for (float& statistic : buffer->values) statistic = static_cast<float>(*value++ * scale);
}

Evaluation EvaluationSums::mean() const {
  Evaluation mean;
  mean.loss = loss / std::max(1.0, samples);
  mean.accuracy = words > 0 ? 1 - word_errors / words : correct / std::max(1.0, samples);
  mean.second = words > 0 ? character_errors / std::max(1.0, characters) : top5 / std::max(1.0, samples);
  return mean;
}

bool counts_top5(const Dataset& data) {
  return data.task() == Task::classification && data.classes() > 10;
}

void add_transcript_errors(const Module& module, const Tensor& logits, const Batch& batch,
                           EvaluationSums& sums) {
  const std::vector<float> values = logits.to_vector();
  const auto size = static_cast<std::size_t>(batch.size()), classes = static_cast<std::size_t>(logits.dim(1));
  const std::vector<std::int32_t> frames = output_frames(module, batch);
  const std::size_t longest = batch.labels.size() / size;
  for (std::size_t i = 0; i < size; ++i) {
    std::vector<std::int32_t> path;
    for (std::size_t t = 0; t < static_cast<std::size_t>(frames[i]); ++t) {
      const auto row = values.begin() + static_cast<std::ptrdiff_t>((t * size + i) * classes);
      path.push_back(
          static_cast<std::int32_t>(std::max_element(row, row + static_cast<std::ptrdiff_t>(classes)) - row));
    }
    const std::span<const std::int32_t> said(batch.labels.data() + i * longest,
                                             static_cast<std::size_t>(batch.lengths[i]));
    const TranscriptErrors errors =
        transcript_errors(decode_transcript(collapse_path(path)), decode_transcript(said));
    sums.word_errors += static_cast<double>(errors.word_errors);
    sums.words += static_cast<double>(errors.words);
    sums.character_errors += static_cast<double>(errors.character_errors);
    sums.characters += static_cast<double>(errors.characters);
  }
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

EvaluationSums evaluation_sums(BuiltModel& model, Batches& batches, const EvaluationHook& hook) {
  const Dataset& data = batches.loader().dataset();
  const DeviceBackend& device = backend(model.store.device());
  constexpr std::size_t kLoss = 0, kCorrect = 1, kTop5 = 2;
  std::array<double, 3> host{};
  Tensor memory = Tensor::zeros({sizeof host / sizeof(float)}, Layout::plain, model.store.device());
  double* const on_device = reinterpret_cast<double*>(memory.data());
  ForwardContext context;
  context.training = false;
  EvaluationSums sums;
  batches.start_epoch(0);
  for (std::int64_t done = 0; hook(done, batches.loader().steps_per_epoch()); ++done) {
    const BatchView* batch = batches.next();
    if (!batch) break;
    context.frames = batch->frames;
    const auto losses = static_cast<double>(batch->losses);
    Variable output, loss;
    if (data.task() == Task::language_model) {  // nothing but the loss is asked for, so logits are not made
      loss = model.loss(*batch, context);
    } else {
      output = model.forward(batch->images, context);
      loss = batch_loss(output, *batch);
    }
    device.add_to_sum(on_device + kLoss, loss.value().data(), losses);
    sums.samples += losses;
    if (data.task() == Task::classification)
      count_correct(output.value(), batch->labels, 1, on_device + kCorrect);
    if (counts_top5(data)) count_correct(output.value(), batch->labels, 5, on_device + kTop5);
    if (data.task() == Task::transcription)
      add_transcript_errors(*model.module, output.value(), *batch->host, sums);
  }
  device.to_host(reinterpret_cast<float*>(host.data()), memory.data(), sizeof host / sizeof(float));
  sums.loss = host[kLoss], sums.correct = host[kCorrect], sums.top5 = host[kTop5];
  return sums;
}

}  // namespace topknot
