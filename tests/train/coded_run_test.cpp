// Runs with exchange.collective=coded_sum are those with sums in rank order, bit for bit, and send less.
#include "tests/train/small_run.h"
#include "train/metrics/run_config.h"
#include "train/plan/profile.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("a run by coded sums ends with the parameters of sums in rank order, and sends less") {
  const Keys common{"train.max_steps=20"};
  for (const Keys& keys : std::vector<Keys>{{"compress.name=dense"},
                                            {"compress.values=bf16", "exchange.merge=none"},
                                            {"exchange.every=4", "exchange.outer.lr=0.7"},
                                            {"compress.name=powersgd", "compress.rank=2", "dist.ranks=4",
                                             "compress.min_compression=1", "exchange.ranks_per_host=2"}})
    for (const char* backend : {"threads", "gloo"}) {
      INFO(keys.front() << " over " << backend);
      const int ranks = keys.size() > 3 ? 4 : 3;
      const Keys all = with(common, keys);
      const Run plain = train(backend, ranks, with(all, {"dist.ordered_sum=true"}));
      const Run coded = train(backend, ranks, with(all, {"exchange.collective=coded_sum"}));
      CHECK(coded.checksums == plain.checksums);
      CHECK(coded.metrics.steps.back().bytes_sent < plain.metrics.steps.back().bytes_sent);
      CHECK(coded.metrics.steps.back().bytes_sent > 0);
    }
}

TEST_CASE("a plan for coded sums rests on their own times, and is none for other sums") {
  const TempFolder temp, other;
  const Keys planned{"dist.ranks=2", "train.max_steps=3", "exchange.merge=optimal"};
  run_in_directory(small_run(temp, with(planned, {"exchange.collective=coded_sum"})));
  const std::string file = temp.at("run/exchange_profile.json");
  const ExchangeProfile profile = read_exchange_profile(file);
  CHECK(profile.collective == "coded_sum");
  CHECK((profile.sums && profile.reduce.beta > 0));
  const std::string groups = RunConfig(temp.at("run/config.yaml")).text("exchange.groups");
  CHECK_FALSE(groups.empty());
  const auto again = [&](const std::string& collective) {
    run_in_directory(
        small_run(other, with(planned, {"exchange.profile=" + file, "exchange.collective=" + collective})));
    return RunConfig(other.at("run/config.yaml")).text("exchange.groups");
  };
  CHECK(again("coded_sum") == groups);
  CHECK_THROWS_WITH(again("all_gather"), Catch::Contains("exchange.collective is coded_sum there"));
}
