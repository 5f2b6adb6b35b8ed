// Whole runs of every registered method: ranks agree after each step, whatever the backend.

#include "compress/sparse.h"
#include "optim/clip.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/data/made_up_speech.h"
#include "tests/support/bfloat16.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/plan/profile.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// The parameters' checksum of each rank after a short run; they are compared after each step too.
std::vector<std::string> train_dgc(const std::string& backend, int ranks, const Keys& overrides) {
  const Keys keys{"data.train_size=128",         "train.max_steps=24", "optimizer.momentum=0.9",
                  "optimizer.weight_decay=1e-3", "compress.name=dgc",  "compress.warmup=[]"};
  return train(backend, ranks, with(keys, overrides)).checksums;
}

Keys bf16_keys(const Keys& keys) {
  return with({"train.precision=bf16", "train.device=cpu", "train.threads=1", "train.stop_after=0"}, keys);
}

}  // namespace

TEST_CASE("200 steps of every method on 1, 2, 4 and 8 ranks: all ranks hold the same parameters") {
  for (const std::string& method : compressors().names())
    for (int ranks : {1, 2, 4, 8}) {
      INFO(method << ", " << ranks << " ranks");
      const Keys keys =
          with(keys_of_method(method), {"train.max_steps=200", "optimizer.lr=0.005", "train.threads=1"});
      const Run run = train("threads", ranks, keys);  // which compares the checksums after every step
      CHECK(std::isfinite(run.test_loss));
    }
}

TEST_CASE("the config.yaml of a run of any method, with keys it does not use, runs again without a word") {
  for (const std::string& method : compressors().names()) {
    INFO(method);
    const TempFolder temp;
    const Keys keys = with(keys_of_method(method), {"compress.mu=3", "schedule.gamma=0.5", "data.noise=0.1",
                                                    "train.clip_local_scope=tensor"});
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
    const Keys keys = with(keys_of_method(method), {"train.max_steps=10", "data.shard=uneven:3"});
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

TEST_CASE("local clipping at sqrt(N) thr leaves an average of independent shards with norm thr") {
  const std::size_t d = 20000, ranks = 16;
  const double thr = 0.4;
  SimulatedRanks simulated(named("dgc"), whole_group(d, ranks));
  for (std::uint32_t r = 0; r < ranks; ++r) {
    const CounterRng rng(53, RngUse::test, r);
    for (std::size_t i = 0; i < d; ++i) simulated[r].gradient[i] = rng.normal(i);
    const double bound = std::sqrt(static_cast<double>(ranks)) * thr, norm = l2_norm(simulated[r].gradient);
    REQUIRE(norm > bound);
    scale(simulated[r].gradient, clip_factor(norm, bound));
    REQUIRE(l2_norm(simulated[r].gradient) == Approx(bound).epsilon(1e-5));
  }
  REQUIRE(simulated.step(0, 1.0));
  const double norm = l2_norm(simulated[0].average);
  CHECK(norm > 0.9 * thr);
  CHECK(norm < 1.1 * thr);
}

TEST_CASE("compress.clip clips each rank's gradient at sqrt(ranks) times it, over the whole model") {
  const auto clipped = [](const std::string& key, int ranks = 4, const Keys& more = {}) {
    return train_dgc("threads", ranks, with({key, "train.max_steps=6"}, more));
  };
  CHECK(clipped("compress.clip=0.05") == clipped("train.clip_local=0.1"));
  CHECK(clipped("compress.clip=0.05") != clipped("train.clip_local=0.05"));
  const Keys plain{"compress.name=dense", "optimizer.weight_decay=0"};  // before the average as after it
  CHECK(clipped("train.clip_local=0.05", 1, plain) == clipped("train.clip_global=0.05", 1, plain));
  CHECK(clipped("train.clip_local=0.05", 1, plain) != clipped("train.clip_local=0.1", 1, plain));
}

TEST_CASE("all ranks agree under DGC and EF21 with every part on, and threads equal gloo bit for bit") {
  for (const Keys& method : std::vector<Keys>{
           {"compress.clip=1", "compress.warmup=[0.3, 0.1]"},
           {"optimizer.nesterov=true", "compress.scope=tensor", "compress.dense_1d=false"},
           {"compress.momentum_masking=false", "compress.truncate=largest", "exchange.merge=none"},
           {"compress.memory=residual", "compress.resample=false"},
           {"compress.memory=ef21"}}) {
    INFO(method[0]);
    CHECK(train_dgc("threads", 4, method) == train_dgc("gloo", 4, method));
  }
}

TEST_CASE("each part of DGC changes the run") {
  const auto by = [](const Keys& more) { return train_dgc("threads", 2, with({"compress.clip=0.5"}, more)); };
  const auto whole = by({});
  for (const char* part : {"compress.clip=0", "compress.momentum_masking=false", "compress.memory=residual",
                           "compress.warmup=[0.1]", "optimizer.nesterov=true"}) {
    INFO(part);
    CHECK(whole != by({part}));
  }
}

TEST_CASE("bfloat16 on a CPU: ranks agree, threads equal gloo, runs repeat, and the loss is near fp32's") {
  if (!multiplies_bfloat16()) return;
  for (const char* model : {"resnet20", "lenet", "mobilenet_v2"})
    for (const char* method : {"dense", "topk"}) {
      INFO(model << " " << method);
      const Keys keys{std::string("model.name=") + model, std::string("compress.name=") + method,
                      "dist.ordered_sum=true", "train.max_steps=6"};
      const Run narrow = train("threads", 2, bf16_keys(keys));
      CHECK(narrow.checksums == train("gloo", 2, bf16_keys(keys)).checksums);
      const Run wide = train("threads", 2, with(bf16_keys(keys), {"train.precision=fp32"}));
      CHECK(narrow.checksums != wide.checksums);
      // mobilenet_v2 ends in images of one pixel, whose batch norm is over four values.
      const double spread = model == std::string("mobilenet_v2") ? 0.2 : 0.03;
      CHECK(narrow.metrics.steps.front().loss == Approx(wide.metrics.steps.front().loss).epsilon(spread));
      CHECK(narrow.metrics.steps.front().bytes_sent == wide.metrics.steps.front().bytes_sent);
    }
}

TEST_CASE("bfloat16 on a CPU: a run of two compute threads repeats, and one goes on from a checkpoint") {
  if (!multiplies_bfloat16()) return;
  const Keys keys{"model.name=resnet20", "compress.name=dgc", "train.max_steps=12"};
  const Run two = train("threads", 1, with(bf16_keys(keys), {"train.threads=2"}));
  CHECK(two.checksums == train("threads", 1, with(bf16_keys(keys), {"train.threads=2"})).checksums);
  const Keys resumed = with(bf16_keys(keys), {"data.train_size=256", "dist.ranks=2"});
  check_same(whole(resumed), stopped_and_resumed(resumed, 5));
}

TEST_CASE("bfloat16 on a CPU: language models and speech, by gloo, from a checkpoint, near fp32's loss") {
  if (!multiplies_bfloat16()) return;
  const MadeUpText text;
  const MadeUpSpeech speech(8, 4);
  const Keys of_text{"data.name=text",       "data.root=" + text.root(), "data.train_size=0",
                     "data.test_size=0",     "data.sequence_length=10",  "model.name=lstm_lm",
                     "model.width=24",       "model.dropout=0.2",        "optimizer.lr=5",
                     "optimizer.momentum=0", "train.clip_global=0.5",    "compress.name=topk"};
  const Keys of_speech{
      "data.name=speech",  "data.root=" + speech.root(), "data.train_size=0", "data.test_size=0",
      "data.batch_size=2", "model.name=deep_speech",     "model.width=8",     "model.layers=1",
      "optimizer.lr=0.05", "train.clip_global=5",        "compress.name=topk"};
  const Keys of_gpt = with(of_text, {"model.name=gpt", "model.heads=4", "optimizer.lr=0.5"}),
             of_llama = with(of_gpt, {"model.name=llama", "model.kv_heads=2", "model.feed_forward=40"});
  for (const Keys& keys : {of_text, of_gpt, of_llama, of_speech}) {
    INFO(keys.front() << " " << keys.back());
    const Keys narrow = bf16_keys(with(keys, {"dist.ranks=2", "train.max_steps=8", "dist.ordered_sum=true"}));
    const Ended run = whole(narrow);
    CHECK(whole(narrow, "gloo").checksum == run.checksum);
    check_same(run, stopped_and_resumed(narrow, 5));
    const Ended wide = whole(with(narrow, {"train.precision=fp32"}));
    CHECK(wide.checksum != run.checksum);
    for (const std::size_t i : {0, 7})
      CHECK(run.metrics.steps.at(i).loss ==
            Approx(wide.metrics.steps.at(i).loss).epsilon(i == 0 ? 0.03 : 0.15));
  }
}

// exchange.collective=coded_sum
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
  CHECK((profile.sums && profile.reduce.seconds(1 << 20) > 0));
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
