// Whole runs on a GPU: against the CPU's, with and without graphs, by every backend.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/cuda/fixture.h"
#include "tests/data/picture_folder.h"
#include "tests/support/standard_error.h"
#include "tests/train/broken_sample.h"
#include "tests/train/dropout_model.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/safetensors.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// A few steps of a very small network, the density's change after an epoch of few steps among them;
// `check_every` makes the host look, which ends what is in flight.
const Keys kOnGpu{"train.device=cuda",   "train.deterministic=true", "train.max_steps=10",
                  "train.check_every=4", "data.test_size=16",        "data.train_size=32",
                  "data.image_size=12",  "model.hidden=[12]"};

Run on_gpu(int ranks, const Keys& keys, const std::string& backend = "threads") {
  return train(backend, ranks, with(with(kOnGpu, keys), {"dist.backend=" + backend}));
}
Run on_cpu(int ranks, const Keys& keys) {
  return train("threads", ranks, with(with(kOnGpu, keys), {"train.device=cpu"}));
}

// The gradients that a run records.
std::vector<float> recorded(const std::string& device) {
  const TempFolder temp;
  start(temp,
        {"train.device=" + device, "train.deterministic=true", "train.max_steps=3", "data.test_size=8",
         "train.record_gradients=2", "compress.name=topk", "dist.ranks=1"},
        false);
  const GradientsReader file(temp.at("run/gradients.safetensors"));
  std::vector<float> values(file.steps() * file.size());
  file.read(0, values);
  return values;
}

}  // namespace

TEST_CASE("a run on a GPU learns what the CPU's does") {
  for (const char* method : {"dense", "topk", "gaussiank", "dgc", "regtopk"}) {
    INFO(method);
    const Keys keys{std::string("compress.name=") + method, "dist.ordered_sum=true"};
    const Run gpu = on_gpu(2, keys);
    const Run cpu = on_cpu(2, keys);
    REQUIRE(gpu.metrics.steps.size() == cpu.metrics.steps.size());
    CHECK(gpu.metrics.steps.front().loss == Approx(cpu.metrics.steps.front().loss).epsilon(1e-5));
    CHECK(gpu.metrics.steps.back().loss == Approx(cpu.metrics.steps.back().loss).epsilon(0.05));
    CHECK(gpu.test_loss == Approx(cpu.test_loss).epsilon(0.05));
    CHECK(gpu.metrics.steps.front().selected == cpu.metrics.steps.front().selected);
  }
}

TEST_CASE("each step on a GPU has a time of its own, though the host reads many at once") {
  const auto begin = std::chrono::steady_clock::now();
  const Run run = on_gpu(1, {"compress.name=topk", "train.check_every=0", "train.max_steps=40",
                             "train.eval_every=0", "data.train_size=1024"});
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
  const std::vector<StepRecord>& steps = run.metrics.steps;
  REQUIRE(steps.size() == 40);
  std::set<double> rates;
  constexpr double images = 4;  // of a step
  for (std::size_t i = 1; i < steps.size(); ++i) {
    rates.insert(steps[i].images_per_second);
    CHECK(steps[i].time_s - steps[i - 1].time_s ==
          Approx(images / steps[i].images_per_second).epsilon(0.01).margin(2e-6));
  }
  CHECK(rates.size() > 20);
  CHECK(steps.back().time_s < all.count());
}

TEST_CASE("local steps on a GPU learn what the CPU's do, and threads equal gloo") {
  for (const Keys& method : {Keys{"compress.name=dense", "optimizer.name=adamw", "train.clip_global=1"},
                             Keys{"compress.name=topk"}, Keys{"compress.name=sparseloco"}}) {
    INFO(method[0]);
    const Keys keys = with(method, {"exchange.every=3", "dist.ordered_sum=true"});
    const Run gpu = on_gpu(2, keys);
    const Run cpu = on_cpu(2, keys);
    REQUIRE(gpu.metrics.steps.size() == cpu.metrics.steps.size());
    for (std::size_t i = 0; i < gpu.metrics.steps.size(); ++i) {
      const StepRecord &there = gpu.metrics.steps[i], &here = cpu.metrics.steps[i];
      CHECK(there.loss == Approx(here.loss).epsilon(0.05));
      CHECK((there.bytes_sent > 0) == (here.bytes_sent > 0));
    }
    CHECK(gpu.test_loss == Approx(cpu.test_loss).epsilon(0.05));
    CHECK(gpu.checksums == on_gpu(2, keys, "gloo").checksums);
  }
}

TEST_CASE("a local step that is not finite is left out on a GPU, and a sync that is not on all of them") {
  const TempFolder temp;
  const Keys keys{"exchange.every=2",   "compress.name=topk",  "train.max_skips=1000", "optimizer.lr=1e6",
                  "train.max_steps=10", "train.check_every=1", "dist.ranks=2"};
  // Which ends as a run that diverged, and not for ranks whose parameters differ.
  CHECK(says(start_error(temp, with(kOnGpu, keys), false), {"training has diverged"}));
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  CHECK(std::ranges::any_of(metrics.steps, &StepRecord::skipped));
  CHECK((metrics.end && metrics.end->failed));
}

TEST_CASE("graphs, batches made on the GPU, early kernels, looks of the host and gloo change no bit") {
  // Each way by threads, {} by gloo.
  const auto same = [](int ranks, const Keys& keys, const std::vector<Keys>& ways) {
    const auto weights = on_gpu(ranks, keys).checksums;
    for (const Keys& way : ways) {
      INFO(fmt::format("{}, {} ranks: {}", fmt::join(keys, " "), ranks, fmt::join(way, " ")));
      const std::string backend = way.empty() ? "gloo" : "threads";
      CHECK(weights == on_gpu(ranks, with(keys, way), backend).checksums);
    }
  };
  const std::vector<Keys> plainer{{"train.graphs=false"}, {"data.on_device=false"}, {"train.check_every=1"}};
  for (const auto& [method, ranks] : {std::pair("dense", 2), {"topk", 1}, {"topk", 3}, {"dgc", 2}})
    same(ranks, {std::string("compress.name=") + method, "compress.warmup=[0.05]", "data.on_device=true"},
         plainer);
  for (const char* precision : {"train.precision=fp32", "train.precision=bf16"})
    for (const char* method : {"compress.name=topk", "compress.name=dense"})
      same(2, {precision, method},
           {{"train.unproven=early_launch"}, {"train.unproven=early_launch", "train.graphs=false"}});
  for (const char* where :
       {"data.on_device=true", "data.on_device=false"})  // the host looks at an epoch's end
    same(2, {"compress.name=topk", where, "data.train_size=128", "train.check_every=0"},
         {{"train.check_every=1"}});
  // Three epochs, each augmented anew.
  same(2, {"compress.name=topk", "data.augment=true", "data.on_device=true"}, {{"data.on_device=false"}});
  for (const Keys& keys :
       {Keys{"compress.name=topk"}, Keys{"compress.name=gaussiank", "compress.capacity=2"},
        Keys{"compress.name=regtopk", "compress.scope=tensor"}, Keys{"compress.name=signsgd"},
        Keys{"compress.name=topk", "exchange.collective=gtopk"}})
    same(3, with(keys, {"data.shard=uneven:3"}), {{}});
}

TEST_CASE("steps are reported whole and in order while later ones are under way") {
  for (const char* backend : {"threads", "gloo"}) {
    const Keys keys{"compress.name=topk", "data.train_size=1024", "train.max_steps=75"};  // one epoch
    const Run far = on_gpu(2, with(keys, {"train.check_every=0"}), backend);
    const Run near = on_gpu(2, with(keys, {"train.check_every=1"}), backend);
    REQUIRE(far.metrics.steps.size() == 75);
    for (std::size_t i = 0; i < 75; ++i) {
      CHECK(far.metrics.steps[i].step == std::int64_t(i) + 1);
      CHECK(far.metrics.steps[i].loss == near.metrics.steps[i].loss);
      CHECK(far.metrics.steps[i].bytes_sent == near.metrics.steps[i].bytes_sent);
    }
    CHECK(far.metrics.epochs[0].train_loss == near.metrics.epochs[0].train_loss);
    CHECK(far.checksums == near.checksums);
  }
}

TEST_CASE("pictures that are decoded when they are needed reach the GPU, and are not kept there") {
  const PictureFolder folder;
  const Keys keys{"data.name=image_folder", "data.root=" + folder.str(), "data.train_size=0",
                  "data.test_size=0",       "data.batch_size=2",         "compress.name=topk",
                  "dist.ordered_sum=true"};
  const Run gpu = on_gpu(2, keys);
  const Run cpu = on_cpu(2, keys);
  CHECK(gpu.metrics.steps.front().loss == Approx(cpu.metrics.steps.front().loss).epsilon(1e-5));
  CHECK(gpu.test_loss == Approx(cpu.test_loss).epsilon(0.05));
  CHECK(says(error_text([&] { on_gpu(1, with(keys, {"data.on_device=true"})); }),
             {"data.on_device", "image_folder", "auto or false"}));
}

TEST_CASE("a GPU evaluates with the statistics that train.bn_stats asks for") {
  const Keys keys{"model.name=resnet20", "compress.name=topk", "train.max_steps=2", "data.batch_size=2",
                  "data.test_size=4"};
  CHECK(on_gpu(2, with(keys, {"train.bn_stats=mean"})).test_loss !=
        on_gpu(2, with(keys, {"train.bn_stats=local"})).test_loss);
}

TEST_CASE("what a run has timed the next one takes from train.algorithm_cache") {
  const TempFolder cache;
  const Keys keys{"model.name=resnet20", "train.max_steps=2",         "data.batch_size=2",
                  "data.test_size=4",    "train.deterministic=false", "train.algorithm_cache=" + cache.str()};
  const auto kept = [&](const Keys& more = {}) {
    on_gpu(1, with(keys, more));
    const std::filesystem::directory_iterator files(cache.str());
    REQUIRE(std::distance(begin(files), end(files)) == 1);
    return text_of(std::filesystem::directory_iterator(cache.str())->path());
  };
  const std::string first = kept();
  CHECK(contains(first, "weight's gradient of a convolution of [2, 16, 12, 12]"));
  CHECK(contains(first, "batch norm of fp32 [2, 16, 12, 12], relu"));
  CHECK(kept() == first);
  std::filesystem::remove_all(cache.str());
  CHECK(!contains(kept({"train.trial=batch norm=cuDNN spatial"}), "batch norm"));
}

TEST_CASE("clipping, micro-batches and weight decay are the CPU's") {
  for (const Keys& keys :
       {Keys{"train.clip_local=0.5"}, Keys{"train.clip_local=0.1", "train.clip_local_scope=tensor"},
        Keys{"train.clip_global=0.3", "optimizer.weight_decay=0.01"},
        Keys{"train.accumulate=3", "optimizer.nesterov=true"}, Keys{"data.name=synthetic_regression"},
        Keys{"train.accumulate=2", "model.name=test_dropout"}}) {
    INFO(keys.front());
    const Keys all = with({"compress.name=topk", "compress.density=0.1"}, keys);
    const Run gpu = on_gpu(2, all);
    const Run cpu = on_cpu(2, all);
    CHECK(gpu.metrics.steps[1].loss == Approx(cpu.metrics.steps[1].loss).epsilon(1e-4));
    CHECK(gpu.metrics.steps.back().loss == Approx(cpu.metrics.steps.back().loss).epsilon(0.02));
  }
}

TEST_CASE("the bytes that are told of a GPU's steps are those of their densities") {
  const Run run = on_gpu(2, {"compress.name=topk", "compress.warmup=[0.5]"});
  const auto& steps = run.metrics.steps;  // four an epoch
  for (std::size_t i = 0; i < steps.size(); ++i)
    CHECK(steps[i].bytes_sent == steps[i < 4 ? 0 : 4].bytes_sent);
  CHECK(steps[0].bytes_sent > 2 * steps[4].bytes_sent);
}

TEST_CASE("a step with a NaN is skipped by all ranks on a GPU, and leaves no trace") {
  for (const char* graphs : {"train.graphs=true", "train.graphs=false"}) {
    const Run run = on_gpu(2, {"data.name=broken_sample", "data.batch_size=2", "compress.name=topk", graphs,
                               "train.max_steps=16", "compress.density=0.1"});
    std::int64_t skipped = 0;
    for (const StepRecord& step : run.metrics.steps) {
      skipped += step.skipped;
      CHECK(std::isfinite(step.loss) == !step.skipped);
    }
    CHECK(skipped == 2);  // two epochs of eight steps
    CHECK(std::isfinite(run.test_loss));
  }
  // Whose loss it was is named too where no collective tells the others.
  for (const char* method : {"compress.name=topk", "compress.name=dense"}) {
    const testing::StandardError errors;
    on_gpu(2, {"data.name=broken_sample", "data.batch_size=2", method, "train.max_steps=8",
               "compress.density=0.1"});
    const std::string text = errors.text();
    INFO(text);
    CHECK(contains(text, "warning: step 5 is not finite here on rank 1"));
  }
  const Run normalised = on_gpu(2, {"data.name=broken_sample", "data.batch_size=2", "compress.name=topk",
                                    "model.name=resnet20", "train.max_steps=8"});
  CHECK(std::isfinite(normalised.test_loss));  // the running statistics did not take the NaN in
}

TEST_CASE("memories that swap go on as without graphs after a bad step, which a graph has replayed") {
  for (const Keys& method :
       {Keys{"compress.name=topk"}, Keys{"compress.name=dgc"}, Keys{"compress.name=regtopk"},
        Keys{"compress.name=topk", "exchange.merge=none"}}) {
    INFO(method.front());
    const Keys keys = with({"data.name=broken_sample", "data.batch_size=2", "train.max_steps=24",
                            "compress.density=0.1", "optimizer.momentum=0.9"},
                           method);
    const Run replayed = on_gpu(2, keys);
    const Run plain = on_gpu(2, with(keys, {"train.graphs=false"}));
    CHECK(replayed.checksums == plain.checksums);
    std::vector<std::int64_t> bad;
    for (const StepRecord& step : replayed.metrics.steps)
      if (step.skipped) bad.push_back(step.step);
    REQUIRE(bad.size() == 3);                     // one an epoch of eight steps
    CHECK((bad.back() > 16 && bad.back() < 24));  // a replayed one, and steps after it
  }
}

TEST_CASE("convolutions, batch norm and pooling train on a GPU as on the CPU") {
  for (const char* model : {"lenet", "resnet20"}) {
    INFO(model);
    const Keys keys{std::string("model.name=") + model,
                    "compress.name=topk",
                    "compress.density=0.05",
                    "train.max_steps=4",
                    "data.batch_size=2",
                    "data.test_size=4",
                    "optimizer.lr=0.01"};
    const Run gpu = on_gpu(1, keys);
    const Run cpu = on_cpu(1, keys);
    for (std::size_t i = 0; i < 4; ++i)
      CHECK(gpu.metrics.steps[i].loss == Approx(cpu.metrics.steps[i].loss).epsilon(i == 0 ? 1e-4 : 0.05));
    CHECK(gpu.test_loss == Approx(cpu.test_loss).epsilon(0.05));
  }
}

TEST_CASE("bf16 and tf32 train") {
  for (const char* precision : {"tf32", "bf16"}) {
    INFO(precision);
    const Keys keys{"compress.name=topk", std::string("train.precision=") + precision};
    const Run narrow = on_gpu(2, keys), full = on_gpu(2, {"compress.name=topk"});
    CHECK(narrow.test_loss == Approx(full.test_loss).epsilon(0.05));
  }
}

TEST_CASE("what a GPU cannot do is refused with the key's name") {
  CHECK(says(error_text([] {
               on_gpu(1, {"compress.name=topk", "train.distribution_every=2"});
             }),
             {"train.distribution_every", "train.device=cpu"}));
}

TEST_CASE("the parts of each step are timed by the GPU's clock, in graphs and without, and change no bit") {
  for (const Keys& keys :
       {Keys{"compress.name=topk"}, Keys{"compress.name=dense", "dist.ordered_sum=true"},
        Keys{"compress.name=terngrad"}, Keys{"compress.name=topk", "train.graphs=false"},
        Keys{"compress.name=dgc", "train.accumulate=2", "exchange.merge=none", "train.clip_local=0.5"}}) {
    INFO(keys.front());
    const Run timed = on_gpu(2, keys);
    for (const StepRecord& step : timed.metrics.steps) {
      INFO("step " << step.step);
      for (const double seconds : {step.data_s, step.forward_s, step.backward_s, step.update_s, step.encode_s,
                                   step.communicate_s, step.decode_s})
        CHECK((seconds >= 0 && seconds < 60));  // a short piece may lie within one tick of a GPU's clock
      CHECK(step.forward_s + step.backward_s > 0);
      CHECK(step.encode_s + step.communicate_s + step.decode_s > 0);
      CHECK(step.exposed_s >= 0);
    }
    const Run plain = on_gpu(2, with(keys, {"train.step_times=false"}));
    CHECK(std::isnan(plain.metrics.steps.back().forward_s));
    CHECK(plain.checksums == timed.checksums);
  }
}

TEST_CASE("of captured steps the first ten and every 50th are timed, and the others do not say zero") {
  const Keys keys{"compress.name=topk", "train.max_steps=120", "train.check_every=0", "data.train_size=512",
                  "train.eval_every=0"};
  const Run run = on_gpu(2, keys);
  REQUIRE(run.metrics.steps.size() == 120);
  for (const StepRecord& step : run.metrics.steps) {
    INFO("step " << step.step);
    const bool timed = step.step <= 10 || step.step == 51 || step.step == 101;
    for (const double seconds : {step.data_s, step.forward_s, step.backward_s, step.update_s, step.encode_s,
                                 step.communicate_s, step.decode_s, step.exposed_s, step.makespan_s})
      CHECK(std::isnan(seconds) == !timed);
    if (timed) CHECK((step.forward_s + step.backward_s > 0 && step.encode_s > 0));
    CHECK((step.images_per_second > 0 && std::isfinite(step.images_per_second)));
  }
  CHECK(run.metrics.end->encode_p50_s > 0);
  CHECK(run.metrics.end->step_p50_s > 0);
  CHECK(on_gpu(2, with(keys, {"train.graphs=false"})).checksums == run.checksums);
  const Run plain = on_gpu(2, with(keys, {"train.step_times=false"}));
  CHECK(plain.checksums == run.checksums);
  CHECK(std::isnan(plain.metrics.end->encode_p50_s));
  CHECK(plain.metrics.end->step_p50_s > 0);
  // The host measures a staged exchange.
  const Run staged = on_gpu(2, {"compress.name=terngrad", "train.max_steps=8", "train.step_times=false"});
  CHECK(staged.metrics.steps.back().encode_s > 0);
  CHECK(std::isnan(staged.metrics.steps.back().forward_s));
}

TEST_CASE("a GPU's steps are traced as the CPU's are") {
  using Json = nlohmann::json;
  for (const char* method : {"topk", "terngrad"}) {  // on the GPU, and staged
    const TempFolder temp;
    run_in_directory(small_run(temp, with(with(kOnGpu, {"dist.ranks=2", "exchange.merge=none"}),
                                          {std::string("compress.name=") + method, "train.profile_steps=2"})),
                     "threads");
    for (const int rank : {0, 1}) {
      std::ifstream file(temp.at(fmt::format("run/trace_rank{}.json", rank)));
      std::map<std::pair<int, std::string>, int> events;  // by row
      const Json trace = Json::parse(file);
      for (const Json& event : trace.at("traceEvents")) {
        if (event.at("ph") != "X") continue;
        const std::string name = event.at("name");
        const std::int64_t step = event.at("args").at("step");
        CHECK((step == 6 || step == 7));
        CHECK(event.at("dur") >= 0.0);
        ++events[{event.at("tid"), name.substr(0, name.find(':'))}];
      }
      for (const char* name : {"data", "forward", "update"}) CHECK(events[{0, name}] == 2);
      CHECK(events[{0, "backward"}] >= 2);
      for (const int row : {1, 2, 3})  // encode, communicate, decode
        for (const char* group : {"group 0", "group 1", "group 2", "group 3"}) {
          INFO(method << ", row " << row << ", " << group);
          // On the GPU the last group, of a bias, is sent with the one before.
          const bool alone = method != std::string("topk") || row != 2 || group != std::string("group 3");
          CHECK(events[{row, group}] == (alone ? 2 : 0));
        }
    }
  }
}

TEST_CASE("a language model trains on a GPU as on the CPU, the same bits by graphs, ranks and backends") {
  const MadeUpText text(160);
  const Keys keys{
      "data.name=text",      "data.root=" + text.root(), "data.train_size=0",    "data.test_size=0",
      "data.batch_size=2",   "data.sequence_length=10",  "model.name=lstm_lm",   "model.width=10",
      "optimizer.lr=2",      "optimizer.momentum=0",     "compress.name=topk",   "compress.density=0.1",
      "train.clip_global=1", "train.max_steps=20",       "train.eval_every=0.5", "compress.warmup=[]"};
  for (const char* dropout : {"model.dropout=0", "model.dropout=0.3"}) {
    const Run gpu = on_gpu(2, with(keys, {dropout}));
    const Run cpu = on_cpu(2, with(keys, {dropout}));
    REQUIRE(gpu.metrics.steps.size() == 20);
    CHECK(gpu.metrics.steps[1].loss == Approx(cpu.metrics.steps[1].loss).epsilon(1e-4));
    CHECK(gpu.metrics.steps.back().loss == Approx(cpu.metrics.steps.back().loss).epsilon(0.02));
    REQUIRE(gpu.metrics.evals.size() == cpu.metrics.evals.size());
    CHECK(gpu.metrics.evals[0].test.loss == Approx(cpu.metrics.evals[0].test.loss).epsilon(0.01));
    CHECK(gpu.metrics.end->held_out_loss.value() ==
          Approx(cpu.metrics.end->held_out_loss.value()).epsilon(0.02));
  }
  const auto graphs = on_gpu(2, with(keys, {"model.dropout=0.3"})).checksums;
  CHECK(graphs == on_gpu(2, with(keys, {"model.dropout=0.3", "train.graphs=false"})).checksums);
  CHECK(graphs == on_gpu(2, with(keys, {"model.dropout=0.3", "train.eval_every=0"})).checksums);
  CHECK(graphs == on_gpu(2, with(keys, {"model.dropout=0.3"}), "gloo").checksums);
  const Run bf16 = on_gpu(1, with(keys, {"model.dropout=0", "train.precision=bf16", "model.tied=true"}));
  CHECK(bf16.metrics.steps.back().loss < bf16.metrics.steps.front().loss);
}

TEST_CASE("recorded gradients of a GPU are the CPU's within rounding") {
  const std::vector<float> gpu = recorded("cuda"), cpu = recorded("cpu");
  REQUIRE(gpu.size() == cpu.size());
  REQUIRE(gpu.size() > 100000);  // two steps of 74,002
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < gpu.size(); ++i)
    error += (gpu[i] - cpu[i]) * (gpu[i] - cpu[i]), norm += cpu[i] * cpu[i];
  CHECK(norm > 0);
  CHECK(error < 1e-6 * norm);
}

TEST_CASE("a measured plan serves a run on a GPU") {
  const std::vector<std::string> keys{"train.device=cuda", "compress.name=topk", "exchange.merge=mgwfbp",
                                      "train.max_steps=3", "data.test_size=8"};
  CHECK(train("threads", 2, keys).metrics.steps.size() == 3);
}
