// Ranks with different configurations or data: one message before the first step, the same on every rank.
#include "train/checks.h"

#include <omp.h>

#include "dist/launch/launch.h"
#include "tests/data/small_dataset.h"
#include "tests/support/standard_error.h"
#include "tests/train/small_run.h"
#include "train/network_check.h"

namespace topknot {

using namespace testing;

namespace {

// The one message of all ranks.
std::string message_of(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) CHECK(error == errors[0]);
  return errors[0];
}

// Of three ranks, the last with overrides of its own.
std::string configuration_error(const std::vector<std::string>& odd) {
  return message_of(errors_of_ranks("threads", 3, [&](Communicator& c) {
    check_same_configuration(c, load_config("", c.rank() == 2 ? odd : std::vector<std::string>{}).config);
  }));
}

using MakeData = std::function<std::unique_ptr<Dataset>()>;

std::string data_error(const MakeData& make, const MakeData& odd, int ranks = 3) {
  return message_of(errors_of_ranks("threads", ranks, [&](Communicator& c) {
    check_same_data(
        c, data_fingerprint({c.rank() == 1 ? odd() : make(), std::make_unique<SmallDataset>(5, true)}));
  }));
}

MakeData small(std::int64_t size = 20, Shape shape = {2, 6, 7}) {
  return [=] { return std::make_unique<SmallDataset>(size, true, shape); };
}

// One pixel of one picture, or one label, is another.
class Changed final : public Dataset {
 public:
  Changed(std::int64_t size, std::int64_t pixel_of, std::int64_t label_of, std::uint64_t names = 0)
      : size_(size), pixel_of_(pixel_of), label_of_(label_of), names_(names) {}
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {3, 5, 7}; }
  int classes() const override { return 2; }
  std::int32_t label(std::int64_t index) const override { return index == label_of_; }
  std::uint64_t class_names_checksum() const override { return names_; }
  void get(std::int64_t index, float* sample) const override {
    for (std::int64_t i = 0; i < 105; ++i) sample[i] = static_cast<float>(index + i);
    if (index == pixel_of_) sample[104] = -1;
  }

 private:
  std::string name_ = "changed";
  std::int64_t size_, pixel_of_, label_of_;
  std::uint64_t names_;
};

MakeData changed(std::int64_t size, std::int64_t pixel_of, std::int64_t label_of, std::uint64_t names = 0) {
  return [=] { return std::make_unique<Changed>(size, pixel_of, label_of, names); };
}

// Gathers and sums over the host, and then spoils one value on rank 1.
NetworkPath spoilt(Communicator& host, bool gather, std::size_t from_bytes) {
  const bool here = host.rank() == 1;
  NetworkPath path;
  path.over = "a bad wire";
  path.gather = [&host, here, gather, from_bytes](std::span<const std::byte> mine, std::span<std::byte> all) {
    std::vector<std::vector<std::byte>> blocks;
    host.all_gather(mine, blocks);
    for (std::size_t r = 0; r < blocks.size(); ++r)
      std::copy(blocks[r].begin(), blocks[r].end(), all.begin() + r * mine.size());
    if (here && gather && all.size() >= from_bytes) all[all.size() - 1] ^= std::byte{1};
    return 0.001;
  };
  path.sum = [&host, here, gather, from_bytes](std::span<float> data) {
    host.all_reduce(data, SumOrder::ranks);
    if (here && !gather && data.size_bytes() >= from_bytes) data[7] += 1;
    return 0.001;
  };
  return path;
}

}  // namespace

TEST_CASE("ranks with another configuration learn which keys differ, both values and whose they are") {
  CHECK(configuration_error({}).empty());
  CHECK(configuration_error({"optimizer.lr=0.2", "model.name=mlp"}) ==
        "the ranks disagree about the configuration: model.name is resnet20 on ranks 0 and 1, mlp on rank 2; "
        "optimizer.lr is 0.1 on ranks 0 and 1, 0.2 on rank 2; start all ranks with the same file and command "
        "line");
  CHECK(configuration_error({"data.root=/elsewhere", "data.workers=3", "output.dir=x", "dist.interface=eth1",
                             "train.algorithm_cache=/elsewhere"})
            .empty());
  CHECK(says(configuration_error({"seed=9", "train.epochs=9", "train.max_steps=9", "train.log_every=9",
                                  "train.max_skips=9", "train.check_every=9", "train.threads=9"}),
             {"seed is 1", "and 2 more"}));
}

TEST_CASE("ranks with other data learn what differs before the first step") {
  CHECK(data_error(small(), small()).empty());
  CHECK(says(data_error(small(), small(23)),
             {"the number of training samples is 20 on ranks 0 and 2, 23 on rank 1", "data.root"}));
  CHECK(says(data_error(small(), small(20, {2, 7, 6})),
             {"the shape of training samples is [2, 6, 7] on ranks 0 and 2, [2, 7, 6] on rank 1"}));
  CHECK(says(data_error(small(), changed(20, -1, -1), 8),
             {"the number of classes of training samples is 5 on ranks 0, 2, 3, 4 and 3 more, 2 on rank 1"}));
  for (const MakeData& odd : {changed(40, 39, -1), changed(40, -1, 38)})
    CHECK(
        says(data_error(changed(40, -1, -1), odd), {"about the data: the checksum of training samples is "}));
  CHECK(says(data_error(changed(40, -1, -1), changed(40, -1, -1, 7)),
             {"about the data: the checksum of the vocabulary or the classes' names is "}));
}

TEST_CASE("the checksum of much data takes all labels and evenly spaced samples") {
  constexpr std::int64_t kSampleBytes = 105 * sizeof(float);
  const auto sum = [](std::int64_t pixel_of, std::int64_t label_of) {
    return data_checksum(Changed(100, pixel_of, label_of), 10 * kSampleBytes);
  };
  const std::uint64_t plain = sum(-1, -1);
  for (const std::int64_t index : {0, 10, 90}) CHECK(sum(index, -1) != plain);
  for (const std::int64_t index : {1, 9, 99}) CHECK(sum(index, -1) == plain);
  for (const std::int64_t index : {0, 1, 99}) CHECK(sum(-1, index) != plain);
  CHECK(data_checksum(Changed(100, -1, -1), 1) != data_checksum(Changed(101, -1, -1), 1));
  DatasetOptions options;
  const auto regression = [&] {
    return data_checksum(*make_dataset("synthetic_regression", options, Split::train));
  };
  const std::uint64_t one = regression();
  CHECK(one == regression());
  options.seed = 2;
  CHECK(one != regression());
}

TEST_CASE("a run does not begin on ranks with different pictures") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"dist.ranks=2"});
  Config other = loaded.config;
  other.seed = 2;
  const RunData data[] = {load_data(loaded.config), load_data(other)};
  const RunDirectory directory = create_run_directory(loaded, {});
  for (const char* backend : {"threads", "gloo"})
    CHECK(says(message_of(errors_of_ranks(backend, 2,
                                          [&](Communicator& c) {
                                            run_rank({loaded.config, data[c.rank()], directory, true, {}}, c);
                                          })),
               {"the ranks disagree about the data", "the checksum of test samples"}));
}

TEST_CASE("compute threads are a rank's share of cores, at most OMP_NUM_THREADS, or train.threads") {
  const auto threads = [](const std::string& ranks, const std::string& given) {
    return compute_threads(load_config("", {"dist.ranks=" + ranks, "train.threads=" + given}).config);
  };
  const char* const before = std::getenv("OMP_NUM_THREADS");
  const std::string old = before ? before : "";
  unsetenv("OMP_NUM_THREADS");
  const int cores = usable_cores();
  CHECK(threads("1", "0") == cores);
  CHECK(threads("2", "0") == std::max(1, cores / 2));
  CHECK(threads("1000", "0") == 1);
  setenv("OMP_NUM_THREADS", "1,2", 1);
  CHECK(threads("1", "0") == 1);
  CHECK(threads("1", "5") == 5);
  setenv("OMP_NUM_THREADS", "1000", 1);
  CHECK(threads("1", "0") == cores);
  setenv("OMP_NUM_THREADS", "few", 1);
  CHECK(threads("1", "0") == cores);
  if (before)
    setenv("OMP_NUM_THREADS", old.c_str(), 1);
  else
    unsetenv("OMP_NUM_THREADS");
}

TEST_CASE("ranks with fewer threads than train.threads says are warned of once") {
  const Config config = load_config("", {"train.threads=3"}).config;
  const auto warned = [&](int limited) {  // ranks from this one on have one thread
    const StandardError errors;
    const auto failed = errors_of_ranks("threads", 3, [&](Communicator& c) {
      if (c.rank() >= limited) omp_set_max_active_levels(0);
      settle_threads(c, config);
      CHECK(omp_get_max_threads() == (c.rank() >= limited ? 1 : 3));
    });
    for (const std::string& error : failed) CHECK(error == "");
    return errors.text();
  };
  CHECK(warned(3) == "");
  const std::string text = warned(1);
  CHECK(says(text, {"train.threads: 1 compute thread of 3 on rank 1"}));
  CHECK_FALSE(contains(text, "rank 2"));
}

TEST_CASE("a network that changes one value is found out, in every collective and size") {
  for (const bool gather : {true, false})
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1} << 20}) {
      const auto errors = errors_of_ranks(
          "threads", 2, [&](Communicator& host) { check_path(host, spoilt(host, gather, bytes)); });
      CHECK(says(errors[1], {"rank 1", gather ? "all_gather" : "all_reduce", "a bad wire",
                             "wrong value at place", gather ? (bytes == 1 ? "1023" : "1048575") : "7"}));
      CHECK(says(errors[0], {"wrong value"}));
    }
}

TEST_CASE("the rows of a check count what a rank sends") {
  std::vector<NetworkRow> rows;
  run_ranks("threads", 4, [&](Communicator& host) {
    auto mine = check_path(host, spoilt(host, true, std::size_t{1} << 40));
    if (host.rank() == 0) rows = std::move(mine);
  });
  REQUIRE(rows.size() == 6);
  CHECK(rows[0].bytes == 1024);
  CHECK(rows[0].gigabytes_per_second == Approx(768 / 0.001 / 1e9));  // three of four blocks
  CHECK(rows[5].bytes == 1 << 24);
  CHECK(rows[5].gigabytes_per_second == Approx(1.5 * (1 << 24) / 0.001 / 1e9));  // and twice in a sum
}

}  // namespace topknot
