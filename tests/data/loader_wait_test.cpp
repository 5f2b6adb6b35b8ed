// A loader whose sample cannot be read at present, as from a network file system that hangs, and a stop signal.
#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "data/loader.h"
#include "nn/base/program.h"
#include "tests/data/small_dataset.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

// One sample that is not read before it is released; `on_demand`: as pictures are, which files hold.
class HangingDataset final : public Dataset {
 public:
  HangingDataset(std::int64_t hanging, bool on_demand) : hanging_(hanging), on_demand_(on_demand) {}
  const std::string& name() const override { return data_.name(); }
  std::int64_t size() const override { return data_.size(); }
  Shape sample_shape() const override { return data_.sample_shape(); }
  int classes() const override { return data_.classes(); }
  std::int32_t label(std::int64_t index) const override { return data_.label(index); }
  bool on_demand() const override { return on_demand_; }
  void get(std::int64_t index, float* sample) const override {
    wait(index);
    data_.get(index, sample);
  }
  void decode(std::int64_t index, const CounterRng*, std::uint8_t* pixels,
              std::vector<DamagedFile>&) const override {
    wait(index);
    std::copy_n(data_.bytes(index), sample_shape().numel(), pixels);
  }
  void slow_down(std::chrono::milliseconds each) { each_ = each; }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  void wait(std::int64_t index) const {
    std::this_thread::sleep_for(each_);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return index != hanging_ || released_; });
  }

  const SmallDataset data_{12, true};
  const std::int64_t hanging_;
  const bool on_demand_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool released_ = false;
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
  options.batch = 4;
  options.train = false;
  options.workers = workers;
  options.stop_patience = stop_patience;
  return options;
}

int signal_of(const std::function<void()>& body) {
  int signal = 0;
  try {
    body();
  } catch (const Interrupted& interrupted) {
    signal = interrupted.signal;
    CHECK(std::string(interrupted.what()).find("stopped by SIGTERM while batch 2 of the test data") == 0);
  }
  return signal;
}

}  // namespace

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

TEST_CASE("a batch that comes a while after a stop signal counts") {
  HangingDataset dataset(1, false);
  Loader loader(dataset, evaluation(1, std::chrono::minutes(1)));
  loader.start_epoch(0);
  const Signalled signalled;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    dataset.release();
  });
  Batch batch;
  CHECK(loader.next(batch));
  later.join();
}

TEST_CASE("samples that come slowly after a stop signal are waited for") {
  for (const int workers : {0, 1}) {
    INFO(workers);
    HangingDataset dataset(-1, workers == 0);
    dataset.slow_down(std::chrono::milliseconds(700));  // 2800 for a batch
    Loader loader(dataset, evaluation(workers, std::chrono::seconds(2)));
    loader.start_epoch(0);
    const Signalled signalled;
    Batch batch;
    CHECK(loader.next(batch));
  }
}
