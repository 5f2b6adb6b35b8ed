#include "train/local_steps.h"

#include "dist/comm/collective_queue.h"
#include "tests/support/generated.h"
#include "tests/train/broken_sample.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/setup.h"

namespace topknot {

using namespace testing;

namespace {

constexpr std::size_t kColumns = 5, kRows = 6, kSeed = 3;
using Vector = std::array<double, kColumns>;

// Two ranks, each with a least-squares problem of its own: gradient A^T (A x - b_r), 4 inner steps of rate 0.05.
struct LeastSquares {
  std::vector<double> a = generated(kRows * kColumns, kSeed), b;
  explicit LeastSquares(int rank) : b(generated(kRows, static_cast<std::int64_t>(kSeed) + 1 + rank)) {}

  void gradient(std::span<const float> x, float* to) const {
    std::array<double, kColumns> sum{};
    for (std::size_t row = 0; row < kRows; ++row) {
      double error = -b[row];
      for (std::size_t j = 0; j < kColumns; ++j) error += a[row * kColumns + j] * static_cast<double>(x[j]);
      for (std::size_t j = 0; j < kColumns; ++j) sum[j] += a[row * kColumns + j] * error;
    }
    for (std::size_t j = 0; j < kColumns; ++j) to[j] = static_cast<float>(sum[j]);
  }
};

Config of(const Keys& keys) {
  LoadedConfig loaded = load_config("", with({"compress.dense_1d=false", "exchange.merge=all"}, keys));
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  return loaded.config;
}

// One parameter "w", or with `behind` two, whose values and gradients lie side by side; and what exchanges their changes.
struct OneWeight {
  ParameterStore store;
  std::unique_ptr<LocalSteps> local;
  std::unique_ptr<CollectiveQueue> queue;
  std::unique_ptr<Exchange> exchange;
  Parameter* weight;

  OneWeight(const Config& config, Communicator& communicator, const std::vector<double>& first,
            std::size_t behind = 0) {
    const std::size_t before = first.size() - behind;
    const auto add = [&](const char* name, std::size_t from, std::size_t count) {
      return &store.add(name, {static_cast<std::int64_t>(count)},
                        [&first, from](std::span<float> values, const CounterRng&) {
                          std::copy_n(first.begin() + from, values.size(), values.begin());
                        });
    };
    if (behind > 0) add("v", before, behind);  // an arena begins with the last one
    weight = add("w", 0, before);
    store.build([](const Parameter&) { return true; }, 1);
    REQUIRE(store.arena().weights().size() == first.size());
    local = std::make_unique<LocalSteps>(config, store, communicator.rank());
    local->begin_run(1000);
    queue = std::make_unique<CollectiveQueue>(communicator);
    exchange = std::make_unique<Exchange>(local->arena(), *queue, exchange_options(config));
  }
};

// theta after each of three syncs.
std::vector<std::vector<float>> diloco(const Keys& keys) {
  const Config config = of(with({"exchange.every=4", "dist.ranks=2"}, keys));
  std::vector<std::vector<float>> thetas[2];
  run_ranks("threads", 2, [&](Communicator& c) {
    OneWeight replica(config, c, generated(kColumns, kSeed + 20));
    const LeastSquares problem(c.rank());
    for (std::int64_t step = 0; step < 12; ++step) {
      problem.gradient({replica.weight->value(), kColumns}, replica.weight->gradient());
      const StepContext context{.step = step, .lr = 0.05};
      CHECK(replica.local->inner_step(context, 0));
      CHECK(replica.local->exchanges_after(step) == (step % 4 == 3));
      if (!replica.local->exchanges_after(step)) continue;
      CHECK(replica.local->exchange_after(*replica.exchange, context).committed());
      const auto theta = replica.local->arena().weights();
      CHECK(std::equal(theta.begin(), theta.end(), replica.weight->value()));
      thetas[c.rank()].emplace_back(theta.begin(), theta.end());
    }
  });
  CHECK(thetas[0] == thetas[1]);
  return thetas[0];
}

}  // namespace

// Golden values: a reference in float64 that agrees with OpenDiLoCo's code, run by PyTorch.
TEST_CASE("DiLoCo: three syncs of SGD or AdamW inside, of changes in float or bfloat16, with Nesterov") {
  const Keys sgd{"optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0"};
  struct Case {
    Keys keys;
    std::array<Vector, 3> golden;
  };
  for (const auto& [keys, golden] :
       {Case{sgd,
             {{{-0.2510821878, 0.6197269224, -0.5640706009, -0.07806465724, -0.001861548133},
               {-0.5742223759, 0.6182397971, -0.5698127592, -0.09598360525, -0.019071428},
               {-0.8272243231, 0.6011158209, -0.5822575878, -0.1107606793, -0.04128304829}}}},
        {{"optimizer.name=adamw", "optimizer.beta1=0.9", "optimizer.beta2=0.95", "optimizer.weight_decay=0.1",
          "optimizer.decay_1d=true"},  // which keeps its state over the syncs
         {{{0.02930739458, 0.7331052673, -0.517434145, -0.1554508271, -0.05290438884},
           {-0.03870798249, 0.8594737539, -0.4743495638, -0.2746098269, -0.1497982026},
           {-0.09854100326, 1.008628844, -0.404401368, -0.3869737692, -0.2413733392}}}},
        {with(sgd, {"compress.name=topk", "compress.memory=none", "compress.values=bf16"}),
         {{{-0.2523786098, 0.6197096588, -0.5640297095, -0.07811152266, -0.001857870994},
           {-0.575889352, 0.6181255638, -0.5697763831, -0.09607337569, -0.0191327123},
           {-0.8280841762, 0.6009324947, -0.5822393439, -0.1109017631, -0.041404923}}}}}) {
    INFO(keys.front() << " " << keys.back());
    const auto thetas = diloco(keys);
    REQUIRE(thetas.size() == golden.size());
    for (std::size_t sync = 0; sync < golden.size(); ++sync)
      for (std::size_t j = 0; j < kColumns; ++j)
        CHECK(static_cast<double>(thetas[sync][j]) == Approx(golden[sync][j]).margin(2e-5));
  }
}

// Two fragments, sent every other step and applied a step later. golden: after steps 3, 5, ...: theta, and the weights
// of rank 0.
void check_streaming(const Keys& keys, const std::vector<std::array<Vector, 2>>& golden) {
  const Config config =
      of(with({"exchange.every=4", "exchange.fragments=2", "exchange.overlap_steps=1", "dist.ranks=2",
               "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0"},
              keys));
  run_ranks("threads", 2, [&](Communicator& c) {
    OneWeight replica(config, c, generated(kColumns, kSeed + 20), 3);
    const LeastSquares problem(c.rank());
    std::size_t applied = 0;
    for (std::int64_t step = 0; step < 13; ++step) {
      problem.gradient({replica.weight->value(), kColumns}, replica.weight->gradient());
      const StepContext context{.step = step, .density = 1, .lr = 0.05};
      CHECK(replica.local->inner_step(context, 0));
      CHECK(replica.local->exchanges_after(step) == (step >= 1));
      if (step < 1) continue;
      const StepReport report = replica.local->exchange_after(*replica.exchange, context);
      const bool applies = step >= 2 && step % 2 == 0;
      CHECK((report.bytes_sent > 0) == applies);
      if (!applies) continue;
      const auto theta = replica.local->arena().weights();
      for (std::size_t j = 0; j < kColumns; ++j) {
        CHECK(static_cast<double>(theta[j]) == Approx(golden[applied][0][j]).margin(2e-5));
        if (c.rank() == 0)
          CHECK(static_cast<double>(replica.weight->value()[j]) ==
                Approx(golden[applied][1][j]).margin(2e-5));
      }
      ++applied;
    }
    CHECK(applied == golden.size());
  });
}

TEST_CASE("Streaming DiLoCo: fragments in turn, applied a step later, half of a rank's own weights stays") {
  check_streaming({"exchange.outer.alpha=0.5"},
                  {{{{-0.1053822085, 0.6155191904, -0.5745420996, -0.07234797286, 9.194436039e-06},
                     {-0.2149324004, 0.608500765, -0.5844540392, -0.09985378576, -0.01756078276}}},
                   {{{-0.1053822085, 0.6155191904, -0.5640272153, -0.07808300669, -0.001841873414},
                     {-0.4421519143, 0.6072812206, -0.5773134858, -0.09626072815, -0.01483223328}}},
                   {{{-0.3815918459, 0.6217413002, -0.5640272153, -0.07808300669, -0.001841873414},
                     {-0.5054556392, 0.6087887554, -0.5913162696, -0.1157371689, -0.03102504664}}},
                   {{{-0.3815918459, 0.6217413002, -0.5681849947, -0.092939372, -0.01550061895},
                     {-0.6823831201, 0.602423162, -0.5837812601, -0.1104903541, -0.02857136058}}},
                   {{{-0.5946799953, 0.6142488113, -0.5681849947, -0.092939372, -0.01550061895},
                     {-0.7114568233, 0.6012389015, -0.5978620609, -0.1265472087, -0.04374067516}}},
                   {{{-0.5946799953, 0.6142488113, -0.5769687536, -0.1042457152, -0.03075757262},
                     {-0.8531041067, 0.593141289, -0.5911742351, -0.119781166, -0.04185681496}}}});
}

TEST_CASE("Streaming DiLoCo: changes of 4 bits on the wire, and the weights of all ranks take over") {
  check_streaming(
      {"compress.name=topk", "compress.density=1", "compress.memory=none", "compress.values=e3m0"},
      {{{{-0.1049199182, 0.6169408281, -0.5745420996, -0.07234797286, 9.194436039e-06},
         {-0.1049199182, 0.6169408281, -0.5844540392, -0.09985378576, -0.01756078276}}},
       {{{-0.1049199182, 0.6169408281, -0.5621369033, -0.07728340723, -0.00245852275},
         {-0.3511080078, 0.6183564095, -0.5621369033, -0.07728340723, -0.00245852275}}},
       {{{-0.3741791592, 0.6217687503, -0.5621369033, -0.07728340723, -0.00245852275},
         {-0.3741791592, 0.6217687503, -0.5829641205, -0.1051443061, -0.02506428267}}},
       {{{-0.3741791592, 0.6217687503, -0.5588475384, -0.09373482532, -0.02303243007},
         {-0.5731749709, 0.6141870655, -0.5588475384, -0.09373482532, -0.02303243007}}},
       {{{-0.629113092, 0.6153802565, -0.5588475384, -0.09373482532, -0.02303243007},
         {-0.629113092, 0.6153802565, -0.5796463487, -0.118275786, -0.04454903461}}},
       {{{-0.629113092, 0.6153802565, -0.5702180634, -0.110492135, -0.04757966699},
         {-0.7841099143, 0.6038019515, -0.5702180634, -0.110492135, -0.04757966699}}}});
}

TEST_CASE("outer SGD with and without momentum, as PyTorch writes it") {
  // theta by step for the average changes 1, 0.5, -0.25, 0.125.
  const auto by = [](const Keys& keys) {
    const Config config = of(with({"exchange.every=1"}, keys));
    std::vector<float> thetas;
    run_ranks("threads", 1, [&](Communicator& c) {
      OneWeight replica(config, c, {1.0});
      for (std::int64_t step = 0; step < 4; ++step) {
        const std::array change{1.0f, 0.5f, -0.25f, 0.125f};
        *replica.weight->value() -= change[step];
        replica.local->exchange_after(*replica.exchange, {.step = step});
        thetas.push_back(*replica.weight->value());
      }
    });
    return thetas;
  };
  const auto check = [](const std::vector<float>& thetas, const std::array<double, 4>& golden) {
    for (std::size_t i = 0; i < 4; ++i) CHECK(static_cast<double>(thetas[i]) == Approx(golden[i]));
  };
  check(by({}), {-0.33, -1.562, -2.0233, -2.76222});
  check(by({"exchange.outer.name=sgd"}), {0.3, -0.68, -1.387, -2.1108});
  check(by({"exchange.outer.name=sgd", "exchange.outer.momentum=0"}), {0.3, -0.05, 0.125, 0.0375});
}

TEST_CASE("a sync that one rank makes not finite leaves all ranks at theta, and names it") {
  for (const Keys& method :
       {Keys{"compress.name=dense"}, Keys{"compress.name=topk", "compress.density=0.5"}}) {
    const Config config = of(with({"exchange.every=1", "dist.ranks=3"}, method));
    run_ranks("threads", 3, [&](Communicator& c) {
      OneWeight replica(config, c, {1, 2, 3, 4});
      float* const x = replica.weight->value();
      const auto moved = [&](const StepContext& context) {
        for (int j = 0; j < 4; ++j) x[j] += 1;
        if (context.step == 0 && c.rank() == 1) x[2] = std::numeric_limits<float>::infinity();
        return replica.local->exchange_after(*replica.exchange, context);
      };
      const StepReport report = moved({.step = 0, .density = 0.5});
      CHECK_FALSE(report.committed());
      CHECK(report.status.bad_rank == 1);
      for (int j = 0; j < 4; ++j) CHECK(x[j] == static_cast<float>(j + 1));
      // The next one goes on as if nothing had been: no residual, no momentum of it.
      CHECK(moved({.step = 1, .density = 1}).committed());
      for (int j = 0; j < 4; ++j) CHECK(static_cast<double>(x[j]) == Approx(j + 1 + 0.7 * 1.9));
    });
  }
}

TEST_CASE("a discarded sync of a fragment leaves all ranks at theta, of that fragment") {
  const Config config = of({"exchange.every=4", "exchange.fragments=2", "exchange.overlap_steps=1",
                            "exchange.outer.alpha=0.5", "dist.ranks=2"});
  run_ranks("threads", 2, [&](Communicator& c) {
    OneWeight replica(config, c, {1, 2, 3, 4}, 2);
    float* const x = replica.weight->value();
    const auto move = [&](std::int64_t step) {
      for (int j = 0; j < 4; ++j) x[j] += 1;
      if (step == 1 && c.rank() == 1) x[0] = std::numeric_limits<float>::infinity();
      return replica.local->exchanges_after(step)
                 ? replica.local->exchange_after(*replica.exchange, {.step = step, .density = 1})
                 : StepReport();
    };
    CHECK(move(0).committed());
    CHECK(move(1).committed());  // sent
    const StepReport report = move(2);
    CHECK_FALSE(report.committed());
    CHECK(report.status.bad_rank == 1);
    CHECK((x[0] == 1 && x[1] == 2));  // not half of what the rank has
    CHECK((x[2] == 6 && x[3] == 7));  // the other fragment's own steps stay
    CHECK(move(3).committed());       // the other one is sent
    CHECK(move(4).committed());
    CHECK(x[0] == 3);
    // theta + (theta - x) (0.7 and momentum), and half of the way from there to x.
    CHECK(static_cast<double>(x[2]) == Approx(0.5 * 8 + 0.5 * (3 + 4 * 0.7 * 1.9)));
  });
}

TEST_CASE("an inner step that is not finite changes nothing on its rank") {
  const Config config = of({"exchange.every=4", "optimizer.name=adamw", "train.clip_global=1"});
  run_ranks("threads", 1, [&](Communicator& c) {
    OneWeight replica(config, c, {1, 2});
    const auto inner = [&](float gradient, float loss) {
      replica.weight->gradient()[0] = gradient, replica.weight->gradient()[1] = 1;
      return replica.local->inner_step({.step = 0, .lr = 0.1}, loss);
    };
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK_FALSE(inner(nan, 0));
    CHECK_FALSE(inner(1, nan));
    CHECK(replica.weight->value()[0] == 1.0f);
    for (const auto& buffer : replica.local->inner_state().back()) CHECK(buffer == 0.0f);
    CHECK(inner(1, 0));
    CHECK(static_cast<double>(replica.weight->value()[0]) == Approx(0.9).epsilon(1e-3));
  });
}

TEST_CASE("with a sync in every step and outer SGD of rate 1, local steps are data-parallel SGD") {
  const Keys sgd{"optimizer.momentum=0", "optimizer.weight_decay=0.01"};
  const Run together = train("threads", 4, sgd);
  const Run local = train("threads", 4,
                          with(sgd, {"exchange.every=1", "exchange.outer.name=sgd", "exchange.outer.lr=1",
                                     "exchange.outer.momentum=0"}));
  CHECK(local.test_loss == Approx(together.test_loss).epsilon(1e-4));
  CHECK(local.metrics.end->bytes_sent == together.metrics.end->bytes_sent);
  REQUIRE(local.metrics.steps.size() == together.metrics.steps.size());
  for (std::size_t i = 0; i < local.metrics.steps.size(); ++i)
    CHECK(local.metrics.steps[i].loss == Approx(together.metrics.steps[i].loss).epsilon(1e-4));
}

TEST_CASE("nothing is sent between syncs, and the last step of a run ends with one") {
  for (const StepRecord& step : train("threads", 2, {"exchange.every=8", "train.max_steps=20"}).metrics.steps)
    CHECK((step.bytes_sent > 0) == (step.step % 8 == 0 || step.step == 20));
  // Fragments mean nothing without local steps.
  const Keys keys{"exchange.fragments=3", "train.max_steps=4"};
  CHECK(train("threads", 2, keys).checksums == train("threads", 2, {"train.max_steps=4"}).checksums);
}

TEST_CASE("every method exchanges changes as it does gradients: ranks agree, threads equal gloo") {
  for (const std::string& method : compressors().names()) {
    Keys keys = with(keys_of_method(method), {"exchange.every=3", "train.max_steps=14"});
    if (method == "lags") keys = with(keys, {"exchange.outer.name=sgd", "exchange.outer.momentum=0"});
    CHECK(train("threads", 2, keys).checksums == train("gloo", 2, keys).checksums);
  }
}

TEST_CASE("methods that take turns count syncs, not steps") {
  // ACP-SGD sends one factor of each matrix, then the other, of other sizes.
  const Run run =
      train("threads", 2, with(keys_of_method("acpsgd"), {"exchange.every=2", "train.max_steps=8"}));
  const auto sent = [&](std::size_t step) { return run.metrics.steps.at(step - 1).bytes_sent; };
  CHECK(sent(2) != sent(4));
  CHECK(sent(4) != sent(6));
  CHECK(sent(4) == sent(8));
}

TEST_CASE("evaluations between syncs see the weights that all ranks share") {
  // An epoch is 64 steps; an evaluation every 16, a sync every 32.
  const Run run = train("threads", 2, {"exchange.every=32", "train.max_steps=96", "train.eval_every=0.25"});
  REQUIRE(run.metrics.evals.size() == 6);
  for (std::size_t i = 0; i + 1 < 4; ++i)  // after steps 32 and 48 the same
    CHECK((run.metrics.evals[i].test.loss == run.metrics.evals[i + 1].test.loss) == (i == 1));
  CHECK(run.metrics.evals[3].test.loss == run.metrics.evals[4].test.loss);
}

TEST_CASE(
    "local steps: a run that is resumed within a round has the same bits, and so have threads and gloo") {
  const Keys rounds{"exchange.every=7", "dist.ranks=2", "train.max_steps=30", "optimizer.momentum=0.9",
                    "train.stop_after=0"},
      fragments{"exchange.every=8",  "exchange.fragments=2",      "exchange.overlap_steps=3",
                "dist.ranks=2",      "exchange.outer.alpha=0.25", "train.max_steps=30",
                "train.stop_after=0"},
      hosts{"exchange.every=8", "exchange.ranks_per_host=2", "dist.ranks=4", "train.max_steps=24",
            "train.stop_after=0"};
  const std::vector<int> under_way{3, 4, 6, 7, 13};  // a fragment's sync too
  for (const auto& [keys, stops] : std::vector<std::pair<Keys, std::vector<int>>>{
           {with(rounds, {"compress.name=dense", "optimizer.name=adamw"}), {4}},
           {with(rounds, {"compress.name=topk", "compress.density=0.1"}), {4}},
           {with(rounds, {"model.name=resnet20", "data.batch_size=2", "data.test_size=4", "train.max_steps=9",
                          "compress.name=topk"}),
            {4}},
           {with(fragments, {"compress.name=dense", "optimizer.name=adamw"}), under_way},
           {with(fragments, {"compress.name=topk", "compress.density=0.1", "exchange.merge=none"}),
            under_way},
           {with(fragments, {"compress.name=powersgd", "compress.density=0.001", "compress.warmup=[]"}),
            under_way},
           {with(hosts, {"optimizer.name=adamw", "exchange.fragments=2", "exchange.overlap_steps=3"}),
            {3, 9}},
           {with(hosts, {"compress.values=int8", "data.shard=uneven:3", "optimizer.lr=0.002"}), {3, 9}},
           {with(hosts, {"compress.name=topk", "exchange.hierarchy=parts"}), {3, 9}}}) {
    INFO(keys[0] << " ... " << keys.back());
    const Ended one = whole(keys);
    for (const int stop : stops) check_same(one, stopped_and_resumed(keys, stop));
    CHECK(whole(keys, "gloo").checksum == one.checksum);
  }
  const StoppedRun temp(rounds, 10);
  CHECK(says(start_error(temp, {"dist.ranks=3"}), {"2 ranks", "exchange.every"}));
  CHECK(says(start_error(temp, {"resume.residuals=sum"}), {"resume.residuals", "keep"}));
}

TEST_CASE("fragments are sent in turn and counted where they arrive; the last step brings all of them") {
  const Run run =
      train("threads", 2,
            {"exchange.every=8", "exchange.fragments=2", "exchange.overlap_steps=3", "train.max_steps=21"});
  REQUIRE(run.metrics.steps.size() == 21);
  std::uint64_t whole = 0;
  for (const StepRecord& step : run.metrics.steps) {
    const bool arrives = step.step > 4 && step.step % 4 == 3;
    CHECK((step.bytes_sent > 0) == (arrives || step.step == 21));
    if (step.step == 7 || step.step == 11) whole += step.bytes_sent;
  }
  // Behind step 21: the one sent after step 20, and again both.
  const Run once = train("threads", 2, {"exchange.every=8", "train.max_steps=8"});
  CHECK(whole == once.metrics.steps.back().bytes_sent);
  CHECK(run.metrics.steps.back().bytes_sent > whole);
}

TEST_CASE("after a sync all ranks have the same batch-norm statistics") {
  const TempFolder temp;
  start(temp,
        {"exchange.every=2", "dist.ranks=2", "train.stop_after=4", "model.name=resnet20", "data.batch_size=2",
         "data.test_size=4"},  // an evaluation would bring them together too
        false);
  const FoundCheckpoint found = find_checkpoint(temp.at("run"));
  const auto statistics = [&](int rank) {
    const std::string name = rank_file(rank);
    const SafetensorsFile file =
        SafetensorsFile::parse(found.store.read(found.step, file_of(found.manifest, name)), name);
    std::vector<std::byte> bytes;
    for (const TensorView& tensor : file.tensors())
      if (tensor.name.starts_with("statistics."))
        bytes.insert(bytes.end(), tensor.data.begin(), tensor.data.end());
    return bytes;
  };
  CHECK_FALSE(statistics(0).empty());
  CHECK(statistics(0) == statistics(1));
}

TEST_CASE("momentum inside a method is the outer optimizer's") {
  const auto options = [](const Keys& more) {
    return compress_options(of(with({"compress.name=dgc", "optimizer.momentum=0.5"}, more)));
  };
  CHECK(options({}).momentum == 0.5);
  CHECK(options({"exchange.every=2"}).momentum == 0.9);
  CHECK(options({"exchange.every=2"}).nesterov);
  CHECK(options({"exchange.every=2", "exchange.outer.name=sgd", "exchange.outer.momentum=0.25"}).momentum ==
        0.25);
}

TEST_CASE("a step that is not finite on one rank is left out by that rank or its host alone, and named") {
  // Each rank sees the broken sample in its own steps only: two of four ranks, 8 samples each, one of them broken.
  const Keys keys{"data.name=broken_sample", "data.batch_size=2", "train.max_steps=12", "exchange.every=4",
                  "model.name=mlp"};
  for (const Keys& hosts : {Keys{}, Keys{"exchange.ranks_per_host=2"}}) {
    const Run run = train("threads", 4, with(keys, hosts));
    std::size_t skipped = 0;
    for (const StepRecord& step : run.metrics.steps) {
      skipped += step.skipped;
      if (step.step % 4 == 0) CHECK(step.bytes_sent > 0);
    }
    CHECK(skipped == 3);  // once an epoch of four steps
    CHECK(std::isfinite(run.test_loss));
  }
}

TEST_CASE("hosts of ranks take the steps of as many ranks with all of the hosts' samples") {
  // A step is an epoch: a host's two shards are those of one of two ranks.
  const Keys one{"data.train_size=64", "train.max_steps=20", "exchange.every=5", "train.clip_global=1"};
  for (const Keys& more :
       {Keys{}, Keys{"compress.name=topk", "compress.density=0.1", "compress.dense_1d=true"},
        Keys{"optimizer.name=adamw", "optimizer.lr=0.001", "exchange.every=4", "exchange.fragments=2"}}) {
    const Keys keys = with(one, more);
    const Run ranks = train("threads", 2, with(keys, {"data.batch_size=32"}));
    const Run hosts = train("threads", 4, with(keys, {"data.batch_size=16", "exchange.ranks_per_host=2"}));
    REQUIRE(hosts.metrics.steps.size() == ranks.metrics.steps.size());
    for (std::size_t i = 0; i < hosts.metrics.steps.size(); ++i) {
      CHECK(hosts.metrics.steps[i].loss == Approx(ranks.metrics.steps[i].loss).epsilon(1e-4));
      CHECK(2 * hosts.metrics.steps[i].bytes_sent == ranks.metrics.steps[i].bytes_sent);  // means of ranks
    }
  }
}

TEST_CASE("distributions are of syncs, and gradients of every step") {
  const TempFolder temp;
  start(temp,
        {"exchange.every=4", "dist.ranks=2", "train.max_steps=12", "train.distribution_every=2",
         "train.record_gradients=3", "compress.name=topk"},
        false);
  const Metrics metrics = metrics_of(temp);
  REQUIRE(metrics.distributions.size() == 3);
  for (std::size_t i = 0; i < 3; ++i)
    CHECK(metrics.distributions[i].step == 4 * static_cast<std::int64_t>(i + 1));
  CHECK(fs::file_size(temp.at("run/gradients.safetensors")) > 3 * 4 * 74000);
}

TEST_CASE("a run with few syncs is warned of") {
  const auto warnings = [](const std::string& every) {
    const Config config =
        of({"model.name=mlp", "data.train_size=64", "data.batch_size=4", "train.max_steps=100",
            "train.epochs=0", "dist.ranks=2", "exchange.every=" + every});
    std::string all;
    for (const std::string& line : check_run(config, load_data(config)).warnings) all += line;
    return all;
  };
  CHECK(says(warnings("30"), {"exchange.every", "4 syncs of 30"}));
  CHECK_FALSE(says(warnings("5"), {"exchange.every"}));
}

TEST_CASE("local steps refuse what clips gradients before they are exchanged") {
  const auto refused = [](const Keys& keys, std::initializer_list<std::string> parts) {
    return says(error_text([&] { of(keys); }), parts);
  };
  CHECK(refused({"exchange.every=4", "train.clip_local=1"}, {"train.clip_local", "train.clip_global"}));
  CHECK(refused({"exchange.every=4", "compress.name=dgc", "compress.clip=1"}, {"compress.clip"}));
  CHECK(refused({"exchange.every=4", "exchange.outer.momentum=0"}, {"exchange.outer.name=sgd"}));
  const Keys fragments{"exchange.every=8", "exchange.fragments=2"};
  CHECK(refused({"exchange.every=8", "exchange.fragments=3"}, {"exchange.fragments", "multiple"}));
  CHECK(refused(with(fragments, {"exchange.overlap_steps=4"}), {"exchange.overlap_steps", "4 steps apart"}));
  CHECK(refused(with(fragments, {"compress.name=topk", "train.distribution_every=2"}),
                {"train.distribution_every"}));
}

}  // namespace topknot
