// Batches: their order and content for any number of workers; stopping, seeking, failing.
#include "data/loader.h"

#include <csignal>

#include "nn/base/program.h"
#include "tests/data/small_dataset.h"

using namespace topknot;

namespace {

struct Seen {
  std::vector<float> values;
  std::vector<std::int32_t> labels;
  std::vector<std::int64_t> indices, sizes;
  bool operator==(const Seen&) const = default;
};

Seen drain(Loader& loader) {
  Seen seen;
  for (Batch batch; loader.next(batch);) {
    CHECK(batch.images.dim(0) == batch.size());
    CHECK(static_cast<std::int64_t>(batch.labels.size()) == batch.size());
    const auto values = batch.images.to_vector();
    seen.values.insert(seen.values.end(), values.begin(), values.end());
    seen.labels.insert(seen.labels.end(), batch.labels.begin(), batch.labels.end());
    seen.indices.insert(seen.indices.end(), batch.indices.begin(), batch.indices.end());
    seen.sizes.push_back(batch.size());
  }
  return seen;
}

LoaderOptions train_options(int workers, int prefetch = 3) {
  LoaderOptions options;
  options.batch_size = 4;
  options.rank = 1;
  options.ranks = 2;
  options.seed = 5;
  options.augment = true;
  options.workers = workers;
  options.prefetch = prefetch;
  return options;
}

// One sample that is not read before it is released; `on_demand`: as pictures are, which files hold.
class HangingDataset final : public SmallDataset {
 public:
  HangingDataset(std::int64_t hanging, bool on_demand)
      : SmallDataset(12, true), hanging_(hanging), on_demand_(on_demand) {}
  // Read sample by sample.
  const std::uint8_t* bytes(std::int64_t) const override { return nullptr; }
  bool on_demand() const override { return on_demand_; }
  void get(std::int64_t index, float* sample) const override {
    wait(index);
    SmallDataset::get(index, sample);
  }
  void decode(std::int64_t index, const CounterRng*, std::uint8_t* pixels,
              std::vector<DamagedFile>&) const override {
    wait(index);
    std::copy_n(SmallDataset::bytes(index), sample_shape().numel(), pixels);
  }
  void slow_down(std::chrono::milliseconds each) { each_ = each; }
  void release() { released_ = true; }

 private:
  void wait(std::int64_t index) const {
    std::this_thread::sleep_for(each_);
    while (index == hanging_ && !released_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const std::int64_t hanging_;
  const bool on_demand_;
  std::atomic<bool> released_ = false;
  std::chrono::milliseconds each_{0};
};

// A stop signal has come while this lives.
struct Signalled {
  Signalled() {
    install_stop_handlers();
    raise(SIGTERM);
  }
  ~Signalled() {
    install_stop_handlers();  // forgets it
    for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
  }
};

LoaderOptions evaluation(int workers,
                         std::chrono::milliseconds stop_patience = std::chrono::milliseconds(200)) {
  LoaderOptions options;
  options.batch_size = 4;
  options.train = false;
  options.workers = workers;
  options.stop_patience = stop_patience;
  return options;
}

int signal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Interrupted& interrupted) {
    CHECK(std::string(interrupted.what()).starts_with("stopped by SIGTERM while batch 2 of the test data"));
    return interrupted.signal;
  }
  return 0;
}

}  // namespace

TEST_CASE("a loader that gives bytes gives the images before their normalisation") {
  for (const bool augment : {false, true})
    for (const bool as_bytes : {true, false}) {
      const SmallDataset dataset(41, as_bytes);
      LoaderOptions options = train_options(1);
      options.augment = augment;
      Loader images(dataset, options);
      options.bytes = true;
      Loader bytes(dataset, options);
      images.start_epoch(2), bytes.start_epoch(2);
      Batch image, byte;
      while (images.next(image)) {
        REQUIRE(bytes.next(byte));
        CHECK(byte.indices == image.indices);
        CHECK(byte.labels == image.labels);
        CHECK(byte.images.defined() == !as_bytes);  // floats stay floats
        const auto values = image.images.to_vector();
        if (as_bytes) {
          REQUIRE(byte.bytes.size() == values.size());
          for (std::size_t i = 0; i < values.size(); ++i)
            REQUIRE(values[i] == normalised(value_of_byte(byte.bytes[i]), 0.4f, dataset.channel_std()[0]));
        } else {
          CHECK(byte.images.to_vector() == values);
        }
      }
      CHECK_FALSE(bytes.next(byte));
    }
}

TEST_CASE("batches are the same bit for bit for any number of workers and any prefetch") {
  const SmallDataset dataset(101, true);
  std::vector<Seen> first;
  for (const int workers : {0, 1, 2, 5})
    for (const int prefetch : {1, 2, 7}) {
      Loader loader(dataset, train_options(workers, prefetch));
      std::vector<Seen> epochs;
      for (int epoch = 0; epoch < 3; ++epoch) {
        loader.start_epoch(epoch);
        epochs.push_back(drain(loader));
        CHECK(static_cast<std::int64_t>(epochs.back().sizes.size()) == loader.steps_per_epoch());
      }
      if (first.empty()) first = epochs;
      CHECK(epochs == first);
    }
  CHECK(first[0].sizes == std::vector<std::int64_t>(12, 4));  // 50 samples per rank
  CHECK_FALSE(first[0].indices == first[1].indices);
}

TEST_CASE("a batch's images and labels are its samples, transformed") {
  const SmallDataset dataset(40, false);
  Loader loader(dataset, train_options(2));
  loader.start_epoch(3);
  const Transform transform(dataset, true, 5);
  const std::int64_t numel = dataset.sample_shape().numel();
  std::vector<float> expected(numel);
  Batch batch;
  int batches = 0;
  while (loader.next(batch)) {
    ++batches;
    CHECK(batch.images.shape() == Shape{4, 2, 6, 7});
    CHECK(batch.images.layout() == Layout::plain);
    CHECK_FALSE(batch.targets.defined());
    for (std::size_t i = 0; i < 4; ++i) {
      transform.apply(batch.indices[i], 3, expected.data());
      const float* image = batch.images.data() + static_cast<std::int64_t>(i) * numel;
      CHECK(std::equal(expected.begin(), expected.end(), image));
      CHECK(batch.labels[i] == dataset.label(batch.indices[i]));
    }
  }
  CHECK(batches == 5);
}

TEST_CASE("an epoch begun at a step gives what the whole epoch gives from there") {
  const SmallDataset dataset(101, true);
  for (const int workers : {0, 2}) {
    Loader loader(dataset, train_options(workers));
    loader.start_epoch(2);
    const Seen whole = drain(loader);
    loader.start_epoch(2, 5);
    const Seen rest = drain(loader);
    CHECK(rest.indices == std::vector<std::int64_t>(whole.indices.begin() + 20, whole.indices.end()));
    CHECK(rest.values == std::vector<float>(whole.values.begin() + 20 * 84, whole.values.end()));
    loader.start_epoch(2, loader.steps_per_epoch());
    CHECK(drain(loader).sizes.empty());
  }
}

TEST_CASE("an epoch can be left at any step, and the next one is unharmed, or the loader destroyed") {
  const SmallDataset dataset(101, true);
  Loader reference(dataset, train_options(0)), loader(dataset, train_options(3));
  reference.start_epoch(1);
  const Seen expected = drain(reference);
  Batch batch;
  for (int left_at = 0; left_at < 6; ++left_at) {
    loader.start_epoch(0);
    for (int step = 0; step < left_at; ++step) REQUIRE(loader.next(batch));
    loader.start_epoch(1);
    CHECK(drain(loader) == expected);
    CHECK_FALSE(loader.next(batch));
  }
  for (int steps = 0; steps < 12; ++steps) {
    Loader destroyed(dataset, train_options(3));
    CHECK_FALSE(destroyed.next(batch));  // no epoch yet
    if (steps == 0) continue;
    destroyed.start_epoch(0);
    for (int step = 1; step < steps; ++step) REQUIRE(destroyed.next(batch));
  }
}

TEST_CASE("evaluation gives every sample once over the ranks, without augmentation") {
  const SmallDataset dataset(11, true);
  for (const int ranks : {1, 3, 16})
    for (const int workers : {0, 2}) {
      std::vector<std::int64_t> all;
      std::vector<float> values;
      for (int rank = 0; rank < ranks; ++rank) {
        LoaderOptions options = train_options(workers);
        options.rank = rank;
        options.ranks = ranks;
        options.train = false;
        Loader loader(dataset, options);
        loader.start_epoch(rank);  // must not matter
        const Seen seen = drain(loader);
        CHECK(static_cast<std::int64_t>(seen.indices.size()) == loader.shard_size());
        all.insert(all.end(), seen.indices.begin(), seen.indices.end());
        values.insert(values.end(), seen.values.begin(), seen.values.end());
        CHECK(loader.weights() == std::vector<float>(ranks, 1.0f));
      }
      std::vector<std::int64_t> expected(11);
      std::iota(expected.begin(), expected.end(), 0);
      CHECK(all == expected);
      const Transform transform(dataset, false, 0);
      std::vector<float> normalised(values.size());
      for (int i = 0; i < 11; ++i) transform.apply(i, std::int64_t{0}, normalised.data() + i * 84);
      CHECK(values == normalised);
    }
}

TEST_CASE("a rank does the steps of the largest shard") {
  const SmallDataset dataset(300, true);
  LoaderOptions options = train_options(2);
  options.rank = 2, options.ranks = 3, options.shard = parse_shard_rule("uneven:4");
  Loader loader(dataset, options);
  loader.start_epoch(0);
  CHECK(drain(loader).sizes == std::vector<std::int64_t>(42, 4));  // of shards of 171, 86 and 43 samples
  CHECK(loader.weights()[0] == Approx(1.71));
}

TEST_CASE("what a worker throws reaches the caller at its batch, every time until the next epoch") {
  for (const int failures : {1 << 30, 1})  // that could be read after the first one too
    for (const int workers : {0, 1, 4}) {
      INFO(failures << " failures, " << workers << " workers");
      const SmallDataset dataset(40, false, {2, 6, 7}, 13, failures);
      LoaderOptions options = train_options(workers);
      options.train = false;
      options.rank = 0;
      Loader loader(dataset, options);  // samples 0 .. 19, batches of 4: sample 13 is in the fourth
      for (int epoch = 0; epoch < (failures > 1 ? 2 : 1); ++epoch) {
        loader.start_epoch(epoch);
        Batch batch;
        for (int step = 0; step < 3; ++step) REQUIRE(loader.next(batch));
        for (int again = 0; again < 2; ++again)
          CHECK_USER_ERROR(loader.next(batch), "sample 13 cannot be read");
      }
    }
}

TEST_CASE("regression batches carry targets and no labels") {
  DatasetOptions data;
  data.train_size = 50;
  data.features = 6;
  data.targets = 3;
  const auto dataset = make_dataset("synthetic_regression", data, Split::train);
  LoaderOptions options;
  options.batch_size = 8;
  options.workers = 1;
  Loader loader(*dataset, options);
  loader.start_epoch(0);
  Batch batch;
  REQUIRE(loader.next(batch));
  CHECK(batch.images.shape() == Shape{8, 6, 1, 1});
  CHECK(batch.targets.shape() == Shape{8, 3});
  CHECK(batch.labels.empty());
  std::vector<float> x(6), y(3);
  dataset->get(batch.indices[5], x.data());
  dataset->target(batch.indices[5], y.data());
  CHECK(std::equal(x.begin(), x.end(), batch.images.data() + 30));
  CHECK(std::equal(y.begin(), y.end(), batch.targets.data() + 15));
}

TEST_CASE("by_label reaches the loader with the labels; options out of range are the user's errors") {
  const SmallDataset dataset(100, true);
  LoaderOptions options = train_options(1);
  options.ranks = 5, options.rank = 2;
  options.shard = parse_shard_rule("by_label");
  Loader loader(dataset, options);
  loader.start_epoch(0);
  CHECK(drain(loader).labels == std::vector<std::int32_t>(20, 2));
  options = {};
  options.workers = -1;
  CHECK_USER_ERROR(Loader(dataset, options), "data.workers");
  options = {};
  options.batch_size = 0;
  CHECK_USER_ERROR(Loader(dataset, options), "data.batch_size");
}

TEST_CASE("a stop signal ends the wait for a batch that does not come; it is not lost") {
  for (const int workers : {0, 1, 2}) {
    INFO(workers);
    HangingDataset dataset(5, workers == 0);
    Loader loader(dataset, evaluation(workers));
    loader.start_epoch(0);
    Batch batch;
    loader.await_batch();
    REQUIRE(loader.next(batch));
    {
      const Signalled signalled;
      loader.await_batch();
      CHECK(signal_of([&] { loader.next(batch); }) == SIGTERM);
      CHECK(signal_of([&] { loader.next(batch); }) == SIGTERM);
    }
    dataset.release();
    REQUIRE(loader.next(batch));
    CHECK(batch.indices == std::vector<std::int64_t>{4, 5, 6, 7});
    REQUIRE(loader.next(batch));
    loader.await_batch();  // at the end
    CHECK_FALSE(loader.next(batch));
  }
}

TEST_CASE("a stop signal ends the wait for the workers of the epoch before") {
  HangingDataset dataset(5, false);
  Loader loader(dataset, evaluation(1));
  loader.start_epoch(0);
  Batch batch;
  REQUIRE(loader.next(batch));
  while (true) {  // until the worker has begun the batch that hangs
    const Signalled signalled;
    if (signal_of([&] { loader.start_epoch(1); }) == SIGTERM) break;
    REQUIRE(loader.next(batch));
  }
  dataset.release();
  loader.start_epoch(1);
  for (int i = 0; i < 3; ++i) REQUIRE(loader.next(batch));
}

TEST_CASE("a batch or samples that come a while after a stop signal count") {
  HangingDataset hanging(1, false);
  Loader waiting(hanging, evaluation(1, std::chrono::minutes(1)));
  waiting.start_epoch(0);
  Batch batch;
  {
    const Signalled signalled;
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      hanging.release();
    });
    CHECK(waiting.next(batch));
    later.join();
  }
  for (const int workers : {0, 1}) {
    INFO(workers);
    HangingDataset dataset(-1, workers == 0);
    dataset.slow_down(std::chrono::milliseconds(700));  // 2800 for a batch
    Loader loader(dataset, evaluation(workers, std::chrono::seconds(2)));
    loader.start_epoch(0);
    const Signalled signalled;
    CHECK(loader.next(batch));
  }
}
