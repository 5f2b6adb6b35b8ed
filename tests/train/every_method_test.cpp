// Whole runs of every registered method: ranks agree after each step, whatever the backend.
#include "compress/sparse.h"
#include "tests/train/small_run.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("200 steps of every method on 1, 2, 4 and 8 ranks: all ranks hold the same parameters") {
  for (const std::string& method : compressors().names())
    for (int ranks : {1, 2, 4, 8}) {
      INFO(method << ", " << ranks << " ranks");
      auto keys = keys_of_method(method);
      keys.insert(keys.end(), {"train.max_steps=200", "optimizer.lr=0.005", "train.threads=1"});
      const Run run = train("threads", ranks, keys);  // which compares the checksums after every step
      CHECK(std::isfinite(run.test_loss));
    }
}

TEST_CASE(
    "the config.yaml of a run of any method, and of one with keys it does not use, runs again without a "
    "word") {
  for (const std::string& method : compressors().names()) {
    INFO(method);
    const TempFolder temp;
    auto keys = keys_of_method(method);
    keys.insert(keys.end(), {"compress.mu=3", "schedule.gamma=0.5", "data.noise=0.1", "train.record_from=1"});
    const LoadedConfig first = small_run(temp, keys);
    CHECK_FALSE(unused_keys(first).empty());
    create_run_directory(first, {});
    const LoadedConfig again = load_config(temp.at("run/config.yaml"), {});
    CHECK(again.problems.empty());
    CHECK(check_config(again.config).empty());
    CHECK(unused_keys(again) == std::vector<std::string>());
    const std::set<std::string> without = keys_without_use(first.config);
    for (const Key& key : config_keys())
      if (key.name.rfind("output.", 0) != 0 && !without.count(key.name))
        CHECK(key_value(key, again.config) == key_value(key, first.config));
  }
}

TEST_CASE("every method gives the same bits by threads and by gloo, with uneven shards") {
  for (const std::string& method : compressors().names()) {
    INFO(method);
    auto keys = keys_of_method(method);
    keys.insert(keys.end(), {"train.max_steps=10", "data.shard=uneven:3"});
    const auto threads = train("threads", 3, keys).checksums;
    CHECK(threads == train("gloo", 3, keys).checksums);
    CHECK(threads == train("link", 3, keys).checksums);
  }
}

TEST_CASE("dense groups of a compressed method can be sent in 16 bits, the same on all ranks and backends") {
  for (const char* values : {"fp16", "bf16"}) {
    INFO(values);
    const std::vector<std::string> keys{"compress.name=topk", std::string("compress.dense_values=") + values};
    const Run run = train("threads", 3, keys), full = train("threads", 3, {"compress.name=topk"});
    CHECK(run.checksums == train("gloo", 3, keys).checksums);
    CHECK(run.checksums != full.checksums);
    CHECK(run.test_loss == Approx(full.test_loss).epsilon(0.05));
    CHECK(run.metrics.steps.back().bytes_sent < full.metrics.steps.back().bytes_sent);
  }
}
