// What rank 0 notes down beside the metrics: raw gradients, and what the bytes of a step add up to.
#include "train/recorder.h"

#include "tests/train/small_run.h"
#include "train/evaluate.h"
#include "train/metrics/npy.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Recorded {
  std::string checksum;
  std::vector<std::size_t> shape;
  std::vector<float> values;
  Metrics metrics;
};

Recorded record(const std::vector<std::string>& overrides) {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, overrides);
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  Recorded result;
  run_ranks("threads", loaded.config.dist.ranks, [&](Communicator& communicator) {
    const RunOutcome outcome = run_rank(inputs, communicator);
    if (communicator.rank() == 0) result.checksum = outcome.parameter_checksum;
  });
  result.metrics = read_metrics(temp.at("run/metrics.jsonl"));
  if (loaded.config.train.record_gradients > 0) {
    const NpyReader reader(temp.at("run/gradients.npy"));
    result.shape = reader.shape();
    result.values.resize(reader.numel());
    reader.read(0, std::span<float>(result.values));
  }
  return result;
}

// The gradient of rank 0's first step, without trainer or exchange.
std::vector<float> first_gradient(const std::vector<std::string>& overrides) {
  const TempFolder temp;
  const Config config = small_run(temp, overrides).config;
  const RunData data = load_data(config);
  const auto model = build_model(config, *data.train);
  ParameterArena& arena = model->store.arena();
  Loader loader(*data.train, loader_options(config, *data.train, true, 0, config.dist.ranks));
  loader.start_epoch(0);
  Batch batch;
  REQUIRE(loader.next(batch));
  ForwardContext context;
  context.seed = config.seed;
  arena.clear_gradients();
  backward(batch_loss(model->module->forward(Variable(batch.images), context), batch));
  const auto gradient = arena.gradient(0, arena.size());
  return {gradient.begin(), gradient.end()};
}

const std::vector<std::string> kTopk{"compress.name=topk", "dist.ranks=2", "train.max_steps=6"};

std::vector<std::string> with(std::vector<std::string> keys, const std::vector<std::string>& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

}  // namespace

TEST_CASE("recorded gradients are rank 0's own, before clipping and compression, and change nothing") {
  const auto expected = first_gradient(kTopk);
  for (const std::vector<std::string>& more : {std::vector<std::string>{},
                                               {"train.clip_local=0.01"},
                                               {"train.clip_local=0.01", "train.clip_local_scope=tensor"},
                                               {"compress.name=dense"}}) {
    INFO((more.empty() ? "topk" : more.back()));
    const auto keys = with(kTopk, more);
    const Recorded recorded = record(with(keys, {"train.record_gradients=2"}));
    REQUIRE(recorded.shape == std::vector<std::size_t>{2, expected.size()});
    CHECK(std::vector<float>(recorded.values.begin(),
                             recorded.values.begin() + static_cast<std::ptrdiff_t>(expected.size())) ==
          expected);
    CHECK(recorded.checksum == record(keys).checksum);
  }
}

TEST_CASE("recording starts where it is told and ends with the run") {
  const Recorded all = record(with(kTopk, {"train.record_gradients=6"}));
  const std::size_t d = all.shape.at(1);
  const Recorded middle = record(with(kTopk, {"train.record_gradients=2", "train.record_from=3"}));
  REQUIRE(middle.shape == std::vector<std::size_t>{2, d});
  CHECK(std::equal(middle.values.begin(), middle.values.end(),
                   all.values.begin() + static_cast<std::ptrdiff_t>(3 * d)));
  const Recorded late = record(with(kTopk, {"train.record_gradients=5", "train.record_from=4"}));
  CHECK(late.shape == std::vector<std::size_t>{2, d});
}

TEST_CASE("the distribution is recorded every so many steps, over all groups as one vector") {
  for (const char* merge : {"all", "none"}) {
    const auto keys = with(kTopk, {std::string("exchange.merge=") + merge, "train.distribution_every=2",
                                   "compress.warmup=[]", "train.record_gradients=2"});
    const Recorded recorded = record(keys);
    const auto& distributions = recorded.metrics.distributions;
    REQUIRE(distributions.size() == 3);
    CHECK(distributions[0].step == 2);
    CHECK(distributions[2].step == 6);
    // Weights only: biases travel dense.
    CHECK(distributions[0].size < static_cast<std::int64_t>(recorded.shape[1]));
    CHECK(distributions[0].k == distributions[0].size / 100);
    CHECK(distributions[0].contraction > 0);
    CHECK(distributions[0].contraction < distributions[0].bound);
  }
}

TEST_CASE("a rank's download is what the others upload, and a sum's own length") {
  const Recorded blocks =
      record({"compress.name=topk", "compress.dense_1d=false", "dist.ranks=4", "train.max_steps=3"});
  for (const StepRecord& step : blocks.metrics.steps) {
    CHECK(step.bytes_sent > 0);
    CHECK(step.bytes_received == 3 * step.bytes_sent);
    CHECK(step.bytes_ratio == step.bytes_dense / step.bytes_sent);
  }
  const EndRecord& end = blocks.metrics.end.value();
  CHECK(end.bytes_received == 3 * end.bytes_sent);
  CHECK(end.bytes_ratio == Approx(end.bytes_dense / end.bytes_sent));
  const Recorded sums = record({"compress.name=dense", "dist.ranks=4", "train.max_steps=3"});
  CHECK(sums.metrics.steps.at(0).bytes_received == sums.metrics.steps.at(0).bytes_dense);
  CHECK(sums.metrics.steps.at(0).bytes_ratio == 1);
  CHECK(record({"compress.name=topk", "train.max_steps=1"}).metrics.steps.at(0).bytes_received == 0);
}
