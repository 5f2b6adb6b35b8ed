#include "train/evaluate.h"

#include <algorithm>

#include "data/transcript.h"
#include "nn/ops/ctc_loss.h"
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

std::vector<std::int32_t> output_frames(const Module& module, const Batch& batch) {
  std::vector<std::int32_t> frames;
  for (const std::int32_t of : batch.frames)
    frames.push_back(static_cast<std::int32_t>(module.output_frames(of)));
  return frames;
}

Variable batch_loss(const Module& module, const Variable& output, const Batch& batch,
                    double label_smoothing) {
  if (!batch.frames.empty())
    return ctc_loss(output, {batch.labels, batch.lengths, output_frames(module, batch)});
  return batch.targets.defined()
             ? mean_squared_error(output, batch.targets)
             : softmax_cross_entropy(output, batch.labels, static_cast<float>(label_smoothing));
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

EvaluationSums evaluation_sums(BuiltModel& model, Loader& loader, const EvaluationHook& hook) {
  ForwardContext context;
  context.training = false;
  EvaluationSums sums;
  loader.start_epoch(0);
  std::int64_t done = 0;
  for (Batch batch; hook(done, loader.steps_per_epoch()) && loader.next(batch); ++done) {
    const std::vector<std::int32_t> frames = output_frames(*model.module, batch);
    context.frames = frames;
    const Variable output = model.forward(batch.images, context);
    const auto n = static_cast<double>(batch.losses());
    sums.loss += batch_loss(*model.module, output, batch).value().data()[0] * n;
    sums.samples += n;
    if (loader.dataset().task() == Task::classification)
      count_correct(output.value(), batch.labels, 1, &sums.correct);
    if (counts_top5(loader.dataset())) count_correct(output.value(), batch.labels, 5, &sums.top5);
    if (loader.dataset().task() == Task::transcription)
      add_transcript_errors(*model.module, output.value(), batch, sums);
  }
  return sums;
}

}  // namespace topknot
