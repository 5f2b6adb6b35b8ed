#pragma once
// A rank's batches of a data set, in the sampler's order, made ahead by any number of worker threads.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "data/dataset.h"
#include "data/sampler.h"
#include "data/transforms.h"
#include "nn/core/tensor.h"

namespace topknot {

struct Batch {
  Tensor images;  // [b, C, H, W], plain, CPU, normalised; undefined if the loader gives bytes
  std::vector<std::uint8_t>
      bytes;  // LoaderOptions::bytes, [b, C, H, W]: the images before normalisation; else empty
  // b of them, none for regression. Of windows of T tokens b T: label t b + i is that of sample i's token t.
  std::vector<std::int32_t> labels;
  Tensor targets;  // [b, targets], regression only, else undefined
  // Transcription: images are [b, 1, bins, frames of the longest], zeros after the others' frames[i]; labels
  // are [b, longest], zeros after the others' lengths[i].
  std::vector<std::int32_t> frames, lengths;
  std::vector<std::int64_t> indices;  // which samples these are; of recordings those that stand in
  std::int64_t size() const { return static_cast<std::int64_t>(indices.size()); }
  // Losses that an evaluation counts: of samples, or of a text's tokens.
  std::int64_t losses() const {
    if (targets.defined() || !frames.empty()) return size();
    return static_cast<std::int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), kNoLabel);
  }
};

// Keys of section `data` that a loader takes as they are.
struct LoaderKeys {
  int batch_size = 32;  // samples per step of this rank
  int workers =
      0;  // threads; 0 makes each batch when it is asked for, in the caller's thread if no file is read
};

struct LoaderOptions : LoaderKeys {
  int rank = 0, ranks = 1;
  ShardRule shard;                // training only
  std::uint64_t seed = 1;         // of order and augmentation
  bool random_windows = false;    // language models, training: RandomWindowSampler in place of StreamSampler
  std::int64_t global_batch = 0;  // training: steps of so many samples of all ranks; 0: of batch_size each
  int accumulate = 1;             // random windows: an epoch is made of whole steps of so many batches
  bool augment = false;           // training only; see resolve_augment()
  int prefetch = 4;               // batches ready or in work ahead of the caller, at least 1
  bool train = true;              // false: every sample once over the ranks, the last batch short
  bool samples = true;            // false: only Batch::indices, for data that lie in a GPU's memory
  bool bytes = false;             // Batch::bytes in place of images, for sets that give bytes
  int max_bad_files = 0;          // damaged files of a set on demand for which another sample stands in
  // The longest wait for a batch after a stop signal, from the signal or from when a sample was last read.
  std::chrono::milliseconds stop_patience{5000};
};

class Loader {
 public:
  // `dataset` must outlive the loader. UserError for options out of range.
  Loader(const Dataset& dataset, const LoaderOptions& options);
  // At any time; waits for batches in work only, in the worst case without end: for a read from a network
  // file system that hangs. A program has an EndAfterSignal (nn/base/program.h) around it.
  ~Loader() { stop(); }

  const Dataset& dataset() const { return dataset_; }
  // Batches of this rank in an epoch, of which an optimizer step takes batches_per_step(), train.accumulate but for a
  // global batch; when training, equal on all ranks.
  std::int64_t steps_per_epoch() const { return sampler_->steps(options_.rank); }
  int batches_per_step() const { return sampler_->batches_per_step(options_.accumulate); }
  // Sampler::share() of this rank.
  float share(int part, int count) const { return sampler_->share(options_.rank, part, count); }
  // The samples of a step of all ranks.
  std::int64_t step_samples() const {
    return options_.global_batch > 0
               ? options_.global_batch
               : std::int64_t{options_.batch_size} * options_.ranks * options_.accumulate;
  }
  // Whether batches are windows of a text that have nothing to do with those before.
  bool random_windows() const {
    return options_.train && options_.random_windows && dataset_.task() == Task::language_model;
  }
  // Samples in this rank's shard; of a stream, its windows.
  std::int64_t shard_size() const { return sampler_->shard_size(options_.rank); }
  // Different samples that an epoch takes over all ranks; of a stream, its windows.
  std::int64_t epoch_samples() const {
    std::int64_t sum = 0;
    for (int rank = 0; rank < options_.ranks; ++rank)
      sum += std::min(sampler_->shard_size(rank), sampler_->steps(rank) * options_.batch_size);
    return sum;
  }
  // Aggregation weights of all ranks, mean 1 (TrainSampler::weights); all 1 for evaluation.
  std::vector<float> weights() const { return sampler_->weights(); }

  // Sampler::enter(), before start_epoch() of that epoch. Returns the batch at which to start.
  std::int64_t enter_epoch(std::int64_t epoch, const std::vector<Dealt>& dealt) {
    return steps_per_epoch() - sampler_->enter(epoch, dealt);
  }
  // Starts an epoch at `first_batch` and drops batches in work. Before the first next().
  void start_epoch(std::int64_t epoch, std::int64_t first_batch = 0);
  std::int64_t epoch() const { return epoch_; }  // started last
  // The next step's batch, false after the last one. Rethrows what making the batch threw, again at each call
  // until the next start_epoch(). Damaged files are counted here, where the order does not depend on the
  // workers: each is named in a warning when it is first met, and the one too many in a UserError. After a
  // stop signal it waits for stop_patience, then throws Interrupted, as start_epoch() does.
  bool next(Batch& batch);
  // Waits until next() need not wait, or until a stop signal.
  void await_batch() {
    std::unique_lock lock(mutex_);
    if (!workers_.empty() && !failed_ && taken_ < end_) wait_for_batch(lock, {});
  }

 private:
  struct Slot {  // step s lives in slot s mod prefetch, from claimed to handed out
    bool ready = false;
    Batch batch;
    std::vector<DamagedFile> damaged;
    std::exception_ptr error;
  };

  Batch make(std::int64_t step, std::vector<DamagedFile>& damaged) const;
  void count(const std::vector<DamagedFile>& damaged);
  std::int64_t read_spectrogram(std::int64_t index, std::vector<float>& spectrogram,
                                std::vector<DamagedFile>& damaged) const;
  void add_recordings(Batch& batch, std::vector<DamagedFile>& damaged) const;
  void work();
  void stop();  // ends and joins the workers
  bool can_claim() const {
    const std::int64_t ahead = options_.workers > 0 ? static_cast<std::int64_t>(slots_.size()) : wanted_;
    return claimed_ < end_ && claimed_ < taken_ + ahead;
  }
  template <class Done>
  bool wait_for_workers(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience,
                        const Done& done);
  bool wait_for_batch(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience);
  [[noreturn]] void interrupted(std::int64_t step) const;

  const Dataset& dataset_;
  const LoaderOptions options_;
  const Transform transform_;
  const std::unique_ptr<Sampler> sampler_;

  // Set between epochs, when no worker is busy; read by workers while they are.
  EpochOrder order_;
  std::int64_t epoch_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable can_work_, can_take_;
  std::vector<Slot> slots_;
  std::int64_t claimed_ = 0, taken_ = 0, end_ = 0;  // next step to make, next to hand out, one past the last
  int busy_ = 0;                                    // workers making a batch
  bool stop_ = false;
  bool wanted_ = false;  // a caller waits for the next batch
  std::exception_ptr failed_;
  mutable std::atomic<std::int64_t> samples_made_{0};  // since the start: whether the workers get on
  std::set<std::int64_t> damaged_;                     // files met so far
  std::vector<std::thread> workers_;
};

}  // namespace topknot
