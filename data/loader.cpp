#include "data/loader.h"

#include <fmt/format.h>

#include <utility>

#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "nn/base/program.h"

namespace topknot {
namespace {

LoaderOptions checked(const LoaderOptions& options) {
  TOPKNOT_CHECK(options.rank >= 0 && options.rank < options.ranks, "rank out of range");
  if (options.batch_size < 1)
    throw UserError(fmt::format("data.batch_size: {} is not at least 1", options.batch_size));
  if (options.workers < 0 || options.workers > 256)
    throw UserError(fmt::format("data.workers: {} is out of range; give 0 to 256", options.workers));
  if (options.prefetch < 1)
    throw UserError(
        fmt::format("the loader must hold at least 1 prefetched batch, not {}", options.prefetch));
  return options;
}

std::vector<std::int32_t> labels_of(const Dataset& dataset) {
  std::vector<std::int32_t> labels;
  if (dataset.classes() == 0) return labels;
  labels.reserve(static_cast<std::size_t>(dataset.size()));
  for (std::int64_t i = 0; i < dataset.size(); ++i) labels.push_back(dataset.label(i));
  return labels;
}

std::unique_ptr<Sampler> make_global_sampler(const Dataset& dataset, const LoaderOptions& options) {
  const bool text = dataset.task() == Task::language_model;
  if (text ? !options.random_windows : dataset.task() == Task::transcription)
    throw UserError(
        "elastic.batch: global is for samples in any order, not for recordings or a text's columns; give "
        "rank");
  const std::int64_t samples = text ? dataset.size() / dataset.labels_per_sample() + 1 : dataset.size();
  return std::make_unique<GlobalBatchSampler>(samples, text ? dataset.size() : 0, options.global_batch,
                                              options.ranks, options.batch_size, options.seed);
}

std::unique_ptr<Sampler> make_sampler(const Dataset& dataset, const LoaderOptions& options) {
  if (options.global_batch > 0) return make_global_sampler(dataset, options);
  if (dataset.task() == Task::language_model) {
    if (options.train && options.shard.kind != ShardRule::Kind::even)
      throw UserError("data.shard: a text is cut into equal columns, which its ranks go down; give even");
    if (options.train && options.random_windows)  // Loader::random_windows()
      return std::make_unique<RandomWindowSampler>(dataset.size(), dataset.labels_per_sample(), options.ranks,
                                                   options.batch_size, options.seed, options.accumulate);
    return std::make_unique<StreamSampler>(dataset.size() + dataset.labels_per_sample(),
                                           dataset.labels_per_sample(), options.ranks, options.batch_size,
                                           options.train);
  }
  if (!options.train) return std::make_unique<EvalSampler>(dataset.size(), options.ranks, options.batch_size);
  if (dataset.task() == Task::transcription) {
    if (options.shard.kind != ShardRule::Kind::even)
      throw UserError("data.shard: recordings are dealt by their length; give even");
    return std::make_unique<LengthSampler>(dataset.size(), options.ranks, options.batch_size, options.seed);
  }
  const bool sorted = options.shard.kind == ShardRule::Kind::by_label;
  return std::make_unique<TrainSampler>(dataset.size(),
                                        sorted ? labels_of(dataset) : std::vector<std::int32_t>(),
                                        options.shard, options.ranks, options.batch_size, options.seed);
}

}  // namespace

Loader::Loader(const Dataset& dataset, const LoaderOptions& options)
    : dataset_(dataset),
      options_(checked(options)),
      transform_(dataset, options.augment && options.train, options.seed),
      sampler_(make_sampler(dataset, options)),
      slots_(static_cast<std::size_t>(options.prefetch)) {
  try {
    // A thread that reads a file may hang in the system; next(), in another one, then hears a stop signal.
    const bool files = options.samples && (dataset.on_demand() || dataset.task() == Task::transcription);
    const int threads = std::max(options.workers, files ? 1 : 0);
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // the system has no thread left: those that started must not outlive the loader
    stop();
    throw;
  }
}

void Loader::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  can_work_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Loader::start_epoch(std::int64_t epoch, std::int64_t first_batch) {
  TOPKNOT_CHECK(first_batch >= 0, "negative batch");
  {
    std::unique_lock lock(mutex_);
    end_ = claimed_;  // nothing more to claim
    if (!wait_for_workers(lock, options_.stop_patience, [this] { return busy_ == 0; })) interrupted(taken_);
    for (auto& slot : slots_) slot = Slot();
    failed_ = nullptr;
    // No worker looks at the order before it has claimed a step under the lock.
    order_ = sampler_->epoch(epoch, options_.rank);
    epoch_ = epoch;
    end_ = steps_per_epoch();
    claimed_ = taken_ = std::min(first_batch, end_);
  }
  can_work_.notify_all();
}

// Until `done`, which a worker makes true. False if a stop signal came and `patience` has passed since, or,
// but for a patience of 0, since a worker last got on.
template <class Done>
bool Loader::wait_for_workers(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience,
                              const Done& done) {
  Patience waited;
  std::int64_t made = samples_made_;
  while (!can_take_.wait_for(lock, std::chrono::milliseconds(100), done)) {
    const std::int64_t before = std::exchange(made, samples_made_);
    if (stop_signal() == 0 || (made != before && patience.count() > 0))
      waited = Patience();
    else if (std::chrono::duration<double>(waited.passed()) >= patience)
      return false;
  }
  return true;
}

bool Loader::wait_for_batch(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience) {
  const Slot& slot = slots_[static_cast<std::size_t>(taken_) % slots_.size()];
  wanted_ = true;
  can_work_.notify_one();
  const bool ready = wait_for_workers(lock, patience, [&] { return slot.ready; });
  wanted_ = false;
  return ready;
}

void Loader::interrupted(std::int64_t step) const {
  throw Interrupted(fmt::format("stopped by {} while batch {} of the {} data was read or made",
                                signal_name(stop_signal()), step + 1, options_.train ? "training" : "test"));
}

bool Loader::next(Batch& batch) {
  std::unique_lock lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  if (taken_ == end_) return false;
  Slot& slot = slots_[static_cast<std::size_t>(taken_) % slots_.size()];
  if (!workers_.empty() && !wait_for_batch(lock, options_.stop_patience)) interrupted(taken_);
  try {
    if (workers_.empty()) slot.batch = make(taken_, slot.damaged);
    count(slot.damaged);
    if (slot.error) std::rethrow_exception(slot.error);
  } catch (...) {
    failed_ = std::current_exception();
    throw;
  }
  batch = std::move(slot.batch);
  slot = Slot();
  ++taken_;
  lock.unlock();
  can_work_.notify_one();
  return true;
}

void Loader::count(const std::vector<DamagedFile>& damaged) {
  const std::string instead = dataset_.task() == Task::transcription ? "one of nearly its length stands in"
                                                                     : "the next one of its class stands in";
  for (const DamagedFile& file : damaged)
    if (damaged_.insert(file.file).second)
      log_warning(damaged_note(fmt::format("{} {}", options_.train ? "training" : "test", file.what), instead,
                               dataset_.left_out() + static_cast<std::int64_t>(damaged_.size()),
                               options_.max_bad_files));
}

void Loader::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    can_work_.wait(lock, [this] { return stop_ || can_claim(); });
    if (stop_) return;
    const std::int64_t step = claimed_++;
    ++busy_;
    lock.unlock();
    Batch batch;
    std::vector<DamagedFile> damaged;
    std::exception_ptr error;
    try {
      batch = make(step, damaged);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    Slot& slot = slots_[static_cast<std::size_t>(step) % slots_.size()];
    slot.batch = std::move(batch);
    slot.damaged = std::move(damaged);
    slot.error = error;
    slot.ready = true;
    --busy_;
    can_take_.notify_all();
  }
}

Batch Loader::make(std::int64_t step, std::vector<DamagedFile>& damaged) const {
  Batch batch;
  batch.indices = order_(step);
  if (!options_.samples) return batch;
  if (dataset_.task() == Task::transcription) {
    add_recordings(batch, damaged);
    return batch;
  }
  const std::int64_t b = batch.size();
  const Shape shape = dataset_.sample_shape();
  const std::int64_t numel = shape.numel();
  const bool bytes = options_.bytes && transform_.gives_bytes();
  with_memory(fmt::format("a batch of {} samples", b), (bytes ? 1.0 : 4.0) * static_cast<double>(b * numel),
              [&] {
                if (bytes)
                  batch.bytes.resize(static_cast<std::size_t>(b * numel));
                else
                  batch.images = Tensor::empty({b, shape[0], shape[1], shape[2]});
                if (dataset_.classes() == 0) batch.targets = Tensor::empty({b, dataset_.targets()});
              });
  for (std::int64_t i = 0; i < b; ++i) {
    const std::int64_t index = batch.indices[static_cast<std::size_t>(i)];
    if (bytes)
      transform_.apply(index, epoch_, batch.bytes.data() + i * numel, damaged);
    else
      transform_.apply(index, epoch_, batch.images.data() + i * numel, damaged);
    if (dataset_.classes() == 0) dataset_.target(index, batch.targets.data() + i * dataset_.targets());
    ++samples_made_;
  }
  if (dataset_.classes() == 0) return batch;
  std::vector<std::int32_t> labels(static_cast<std::size_t>(dataset_.labels_per_sample()));
  const std::size_t rows = batch.indices.size();
  batch.labels.resize(rows * labels.size());
  for (std::size_t i = 0; i < rows; ++i) {
    dataset_.window_labels(batch.indices[i], labels);
    for (std::size_t t = 0; t < labels.size(); ++t) batch.labels[t * rows + i] = labels[t];
  }
  return batch;
}

// Recording `index`, or else the next one that can be read, by length, from the last on to the first.
std::int64_t Loader::read_spectrogram(std::int64_t index, std::vector<float>& spectrogram,
                                      std::vector<DamagedFile>& damaged) const {
  const std::int64_t size = dataset_.size(), bins = dataset_.sample_shape()[1];
  for (std::int64_t next = 0; next < size; ++next) {
    const std::int64_t tried = (index + next) % size, frames = dataset_.frames(tried);
    spectrogram.resize(static_cast<std::size_t>(bins * frames));
    try {
      dataset_.get_frames(tried, spectrogram.data(), frames);
      return tried;
    } catch (const OutOfMemory&) {
      throw;
    } catch (const UserError& error) {
      damaged.push_back({tried, error.what()});
    }
  }
  throw UserError("data.root: not one recording can be read, the first: " + damaged.front().what);
}

void Loader::add_recordings(Batch& batch, std::vector<DamagedFile>& damaged) const {
  std::int64_t most_frames = 0, most_labels = 0;
  const std::int64_t b = batch.size(), bins = dataset_.sample_shape()[1];
  with_memory(fmt::format("a batch of {} recordings", b), 0, [&] {
    std::vector<std::vector<float>> spectrograms(batch.indices.size());
    for (std::size_t i = 0; i < spectrograms.size(); ++i) {
      std::int64_t& index = batch.indices[i];
      index = read_spectrogram(index, spectrograms[i], damaged);
      ++samples_made_;
      most_frames = std::max(most_frames, dataset_.frames(index));
      most_labels = std::max(most_labels, static_cast<std::int64_t>(dataset_.transcript(index).size()));
    }
    batch.images = Tensor::zeros({b, 1, bins, most_frames});
    float* row = batch.images.data();
    for (std::size_t i = 0; i < spectrograms.size(); ++i) {
      const std::int64_t frames = dataset_.frames(batch.indices[i]);
      for (const float* from = spectrograms[i].data(); from < spectrograms[i].data() + spectrograms[i].size();
           from += frames, row += most_frames)
        std::copy_n(from, frames, row);
    }
  });
  for (std::int64_t i = 0; i < b; ++i) {
    const std::int64_t index = batch.indices[static_cast<std::size_t>(i)];
    const auto labels = dataset_.transcript(index);
    batch.frames.push_back(static_cast<std::int32_t>(dataset_.frames(index)));
    batch.lengths.push_back(static_cast<std::int32_t>(labels.size()));
    batch.labels.insert(batch.labels.end(), labels.begin(), labels.end());
    batch.labels.resize(static_cast<std::size_t>((i + 1) * most_labels));
  }
}

}  // namespace topknot
