// Deep Gradient Compression in whole runs: warm-up, local clipping, and ranks that agree.
#include <cmath>

#include "optim/clip.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "train/trainer.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

LoadedConfig loaded_config(const std::vector<std::string>& overrides) {
  LoadedConfig loaded = load_config("", overrides);
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  return loaded;
}

// The parameters' checksum of each rank after a short run; they are compared after each step too.
std::vector<std::string> train(const std::string& backend, int ranks,
                               const std::vector<std::string>& overrides) {
  const TempFolder temp;
  std::vector<std::string> all{"model.name=mlp",
                               "model.hidden=[24]",
                               "data.train_size=128",
                               "data.test_size=64",
                               "data.batch_size=4",
                               "train.max_steps=24",
                               "train.epochs=100",
                               "train.eval_every=0",
                               "train.check_every=1",
                               "optimizer.lr=0.02",
                               "optimizer.momentum=0.9",
                               "optimizer.weight_decay=1e-3",
                               "compress.name=dgc",
                               "compress.density=0.01",
                               "train.log_every=1000",
                               "output.overwrite=true",
                               "output.dir=" + temp.at("run"),
                               "dist.ranks=" + std::to_string(ranks)};
  all.insert(all.end(), overrides.begin(), overrides.end());
  const LoadedConfig loaded = loaded_config(all);
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  std::vector<std::string> checksums(static_cast<std::size_t>(ranks));
  run_ranks(backend, ranks, [&](Communicator& communicator) {
    checksums[static_cast<std::size_t>(communicator.rank())] =
        run_rank(inputs, communicator).parameter_checksum;
  });
  for (const std::string& checksum : checksums) CHECK(checksum == checksums[0]);
  return checksums;
}

}  // namespace

TEST_CASE("compress.warmup_epochs lowers the density exponentially, as the authors' code does") {
  const Config config =
      loaded_config({"compress.name=dgc", "compress.density=0.001", "compress.warmup_epochs=5"}).config;
  const double expected[] = {0.316, 0.1, 0.0316, 0.01, 0.00316};
  for (int epoch = 0; epoch < 5; ++epoch)
    CHECK(density_at_epoch(config, epoch) == Approx(expected[epoch]).epsilon(2e-3));
  CHECK(density_at_epoch(config, 5) == 0.001);
  CHECK(density_at_epoch(config, 100) == 0.001);
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

TEST_CASE("compress.clip clips each rank's gradient at sqrt(ranks) times it") {
  const auto clipped = [](const std::string& key) { return train("threads", 4, {key, "train.max_steps=6"}); };
  CHECK(clipped("compress.clip=0.05") == clipped("train.clip_local=0.1"));
  CHECK(clipped("compress.clip=0.05") != clipped("train.clip_local=0.05"));
}

TEST_CASE("one rank's gradient is clipped over the whole model, before the average as after it") {
  const auto clipped = [](const std::string& key) {
    return train("threads", 1, {key, "compress.name=dense", "train.max_steps=6", "optimizer.weight_decay=0"});
  };
  CHECK(clipped("train.clip_local=0.05") == clipped("train.clip_global=0.05"));
  CHECK(clipped("train.clip_local=0.05") != clipped("train.clip_local=0.1"));
}

TEST_CASE("all ranks agree under DGC and EF21 with every part on, and threads equal gloo bit for bit") {
  const std::vector<std::vector<std::string>> methods = {
      {"compress.clip=1", "compress.warmup_epochs=2"},
      {"optimizer.nesterov=true", "compress.scope=tensor", "compress.dense_1d=false"},
      {"compress.momentum_masking=false", "compress.truncate=largest", "exchange.merge=none"},
      {"compress.memory=residual", "compress.resample=false"},
      {"compress.memory=ef21"},
  };
  for (const auto& method : methods) {
    INFO(method[0]);
    CHECK(train("threads", 4, method) == train("gloo", 4, method));
  }
}

TEST_CASE("each part of DGC changes the run") {
  const auto whole = train("threads", 2, {"compress.clip=0.5"});
  CHECK(whole != train("threads", 2, {}));
  CHECK(whole != train("threads", 2, {"compress.clip=0.5", "compress.momentum_masking=false"}));
  CHECK(whole != train("threads", 2, {"compress.clip=0.5", "compress.memory=residual"}));
  CHECK(whole != train("threads", 2, {"compress.clip=0.5", "compress.warmup_epochs=1"}));
  CHECK(whole != train("threads", 2, {"compress.clip=0.5", "optimizer.nesterov=true"}));
}
