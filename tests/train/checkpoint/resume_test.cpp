// A run that stops and is resumed ends with the bits of one that does not stop.
#include "train/checkpoint/checkpointer.h"

#include <fmt/format.h>

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/checksum.h"
#include "tests/train/made_up_text.h"
#include "tests/train/model_copy.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr int kRanks = 4;
constexpr int kStop = 19;  // in the middle of the second epoch of 16 steps

Keys base(int ranks = kRanks) {
  return with({"data.train_size=256", "train.max_steps=40", "train.eval_every=1", "compress.density=0.05",
               "train.threads=1", "train.stop_after=0"},
              {"dist.ranks=" + std::to_string(ranks)});
}

// Two runs may measure other times: the whole one gets the plan that the other has measured.
void check_resumes(const Keys& keys) {
  const Ended resumed = stopped_and_resumed(with(base(), keys), kStop);
  check_same(whole(with(base(), keys, {"exchange.groups=" + resumed.groups})), resumed);
}

void flip_byte(const std::string& path, std::size_t at) {
  std::string bytes = text_of(path);
  bytes.at(at) = static_cast<char>(bytes[at] ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
}

// Another value in a tensor of the newest checkpoint, with the checksums that belong to it.
void set_value(const CheckpointStore& store, const std::string& name, const std::string& tensor,
               std::size_t index, float value) {
  const std::int64_t step = store.steps().back();
  const std::string path = store.path(step) + "/" + name;
  std::string bytes = text_of(path);
  const SafetensorsFile file = SafetensorsFile::read(path);
  const TensorView& last = file.tensors().back();
  REQUIRE(file.find(tensor));
  const auto to_end =
      static_cast<std::size_t>(last.data.data() + last.data.size() - file.find(tensor)->data.data());
  std::memcpy(bytes.data() + bytes.size() - to_end + index * sizeof value, &value, sizeof value);
  std::ofstream(path, std::ios::binary) << bytes;
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(bytes)));
  Manifest manifest = store.manifest(step);
  for (CheckpointFile& one : manifest.files)
    if (one.name == name) one.checksum = checksum.value();
  std::ofstream(store.path(step) + "/manifest.json") << manifest_text(manifest);
}

std::vector<std::int64_t> saved_steps(const TempFolder& temp) {
  return CheckpointStore(temp.at("run/checkpoints")).steps();
}

Keys text_keys(const std::string& root) {
  return {"data.name=text",    "data.root=" + root,  "data.train_size=0",      "data.test_size=0",
          "data.batch_size=4", "model.name=lstm_lm", "model.width=8",          "model.layers=1",
          "train.max_steps=6", "train.threads=1",    "data.sequence_length=10"};
}

// The folder with the words of a line of train.txt in reverse order.
void reverse_line(const std::string& root, std::size_t number) {
  std::istringstream in(text_of(root + "/train.txt"));
  std::string text;
  std::size_t at = 0;
  for (std::string line; std::getline(in, line); ++at) {
    if (at == number) {
      std::istringstream words(line);
      line.clear();
      for (std::string word; words >> word;) line = word + (line.empty() ? "" : " ") + line;
    }
    text += line + "\n";
  }
  std::ofstream(root + "/train.txt") << text;
}

std::string stopped_with(const TempFolder& temp, const Keys& keys) {
  start(temp, with(keys, {"train.stop_after=3"}), false);
  return temp.at("run");
}

}  // namespace

TEST_CASE("every method goes on bit for bit from the middle of an epoch, by threads and by gloo") {
  for (const std::string& method : compressors().names()) {
    INFO(method);
    const Keys keys = with(base(), keys_of_method(method));
    const Ended expected = whole(keys);
    check_same(expected, stopped_and_resumed(keys, kStop));
    check_same(expected, stopped_and_resumed(keys, kStop, "gloo"));
  }
}

TEST_CASE("every memory, codec, value codec, merge rule and collective goes on bit for bit") {
  const auto each = [](const std::string& key, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      INFO(key << "=" << name);
      check_resumes({"compress.name=topk", key + "=" + (name == "size" ? "size:100000" : name)});
    }
  };
  each("compress.memory", memories().names());
  each("compress.codec", index_codecs().names());
  each("compress.values", value_codecs().names());
  std::vector<std::string> sparse = collectives().names();
  std::erase_if(sparse, codes_sums);
  each("exchange.collective", sparse);
  each("exchange.merge", merge_rules().names());
}

TEST_CASE("schedules, warm-up, shards, clipping, accumulation, hosts and statistics go on bit for bit") {
  for (const Keys& keys : std::vector<Keys>{
           {"schedule.name=cosine", "schedule.warmup_epochs=1.5", "compress.name=dgc",
            "compress.warmup=[0.2, 0.1]"},
           {"data.shard=uneven:3", "compress.name=gaussiank", "train.clip_global=0.5"},
           {"optimizer.name=adamw", "compress.name=topk", "train.eval_every=0.3", "schedule.name=plateau",
            "schedule.gamma=0.5"},
           {"optimizer.name=muon", "compress.name=topk", "schedule.name=cosine", "schedule.warmup_steps=7",
            "train.clip_global=0.5"},
           {"train.accumulate=2", "compress.name=regtopk", "train.clip_local=1"},
           {"exchange.ranks_per_host=2", "compress.name=topk"},
           {"exchange.ranks_per_host=2", "exchange.hierarchy=parts", "compress.name=dgc"},
           {"compress.values=int8"},
           {"compress.values=fp8", "compress.dense_1d=false", "exchange.ranks_per_host=2"},
           {"exchange.collective=coded_sum"},
           {"compress.name=topk", "compress.dense_values=bf16", "compress.dense_1d=true"},
           {"model.name=resnet20", "train.bn_stats=local", "data.train_size=64", "data.test_size=16",
            "train.max_steps=25", "train.eval_every=0.5", "train.checkpoint_every=0.25", "data.workers=0"}}) {
    INFO(keys.front());
    check_resumes(keys);
  }
}

TEST_CASE("a measured plan and measured densities come from the first start") {
  check_resumes({"compress.name=topk", "exchange.merge=optimal"});
  const Keys keys =
      with(base(), {"compress.name=lags", "compress.scope=tensor", "compress.layer_density=auto"});
  const StoppedRun temp(keys, 5);
  const std::string measured = text_of(temp.at("run/layer_density.json"));
  start(temp, keys, true);
  CHECK(text_of(temp.at("run/layer_density.json")) == measured);
}

TEST_CASE("a run may be resumed many times, and a finished one changes nothing") {
  const TempFolder temp;
  const Keys keys = with(base(), {"compress.name=dgc", "train.stop_after=7"});
  RunOutcome last = start(temp, keys, false);
  for (int starts = 1; last.stopped; ++starts) {
    REQUIRE(starts < 10);
    last = start(temp, keys, true);
  }
  const Ended resumed = ended(temp, last);
  check_same(whole(with(base(), {"compress.name=dgc"})), resumed);
  const std::string written = text_of(temp.at("run/config.yaml"));
  CHECK(says(written, {"# command line"}));
  const Ended again = ended(temp, start(temp, keys, true));
  check_same(resumed, again);
  CHECK(text_of(temp.at("run/config.yaml")) == written);  // with the origins of the first start
}

TEST_CASE("a checkpoint learns of the evaluation that its stop had left out, for the starts that follow") {
  const StoppedRun temp(base(2), 32);
  const CheckpointStore store(temp.at("run/checkpoints"));
  CHECK_FALSE(store.manifest(32).position.evaluated);
  start(temp, with(base(2), {"train.stop_after=1"}), true);
  const EvalRecord made = metrics_of(temp).evals.at(0);
  CHECK(made.step == 32);
  const Manifest after = store.manifest(32);
  CHECK(after.position.evaluated);
  CHECK(after.position.evaluation.loss == made.test.loss);
  fs::remove_all(store.path(33));
  const RunOutcome last = start(temp, base(2), true);  // from step 32 again, which is not evaluated again
  check_same(whole(base(2)), ended(temp, last));
}

TEST_CASE("a longer run goes on from a finished one") {
  const TempFolder temp;
  start(temp, with(base(), {"train.max_steps=20"}), false);
  const Ended longer = ended(temp, start(temp, base(), true));
  const Ended expected = whole(base());
  CHECK(longer.checksum == expected.checksum);
  CHECK(longer.metrics.steps.size() == 40);
  const auto loss_of_second_epoch = [](const Ended& run) {
    for (const EpochRecord& epoch : run.metrics.epochs)
      if (epoch.step == 32) return epoch.train_loss;
    return 0.0;
  };
  CHECK(loss_of_second_epoch(expected) > 0);
  CHECK(loss_of_second_epoch(longer) == loss_of_second_epoch(expected));
}

TEST_CASE("another number of ranks is refused unless the residuals' fate is given") {
  const TempFolder made;
  const Keys keys{"compress.name=topk", "train.stop_after=19"};
  start(made, with(base(4), keys), false);
  for (const std::string rule : {"sum", "reset"}) {
    const RunCopy copy(made);
    CHECK(says(start_error(copy, with(base(2), keys)), {"4 ranks", "2", "resume.residuals=sum"}));
    CHECK(says(start_error(copy, with(base(2), {"compress.name=topk", "compress.memory=ef21",
                                                "resume.residuals=sum"})),
               {"ef21"}));
    const RunOutcome outcome =
        start(copy, with(base(2), {"compress.name=topk", "resume.residuals=" + rule}), true);
    CHECK_FALSE(outcome.stopped);
    CHECK(std::isfinite(outcome.test_loss));
  }
}

TEST_CASE("with other ranks a run goes on at its place in the epoch; a loss is of the steps since then") {
  const Keys keys{"train.max_steps=0", "train.epochs=3", "compress.name=topk", "resume.residuals=sum",
                  "schedule.name=cosine"};
  const StoppedRun temp(with(base(4), keys), 19);
  start(temp, with(base(2), keys, {"train.stop_after=5"}), true);
  start(temp, with(base(3), keys, {"train.stop_after=2"}), true);
  start(temp, with(base(3), keys, {"train.accumulate=1"}), true);
  const Metrics metrics = metrics_of(temp);
  // 208 samples are left for 2 ranks, 168 for 3: 14 steps of 12. An epoch of 3 has 21 steps.
  REQUIRE(metrics.epochs.size() == 3);
  CHECK(metrics.epochs[1].step == 19 + 5 + 14);
  CHECK(metrics.epochs[2].step == 19 + 5 + 14 + 21);
  const auto mean_loss = [&](std::size_t first, std::size_t last) {
    double sum = 0;
    for (std::size_t step = first; step <= last; ++step) sum += metrics.steps.at(step - 1).loss;
    return sum / static_cast<double>(last - first + 1);
  };
  CHECK(metrics.epochs[0].train_loss == Approx(mean_loss(1, 16)));
  CHECK(metrics.epochs[1].train_loss == Approx(mean_loss(25, 38)));
  CHECK(metrics.epochs[2].train_loss == Approx(mean_loss(39, 59)));
  for (std::size_t step = 1; step < metrics.steps.size(); ++step) {
    CHECK(metrics.steps[step].epoch > metrics.steps[step - 1].epoch);
    CHECK(metrics.steps[step].lr <= metrics.steps[step - 1].lr);
  }
  CHECK(metrics.steps.back().epoch == 3);
}

TEST_CASE("a run with frozen parameters and first weights of a file goes on without the file") {
  const Keys frozen = {"compress.name=topk", "model.hidden=[24,16]", "model.freeze=[hidden1,output.bias]"};
  check_resumes(frozen);
  const TempFolder temp;
  const Prepared first(with(base(), with(frozen, {"seed=7"})));
  const ModelCopy copy = copy_model(first.model->store);
  const std::string path = temp.at("first.safetensors");
  std::ofstream(path, std::ios::binary) << safetensors_text(model_tensors(first.model->store, copy));
  const Keys keys = with(base(), with(frozen, {"model.init_from=" + path}));
  const std::string expected = whole(keys).checksum;
  CHECK(expected != whole(with(base(), frozen)).checksum);
  start(temp, with(keys, {"train.stop_after=19"}), false);
  fs::remove(path);
  CHECK(start(temp, keys, true).parameter_checksum == expected);
}

TEST_CASE("with sum, the new ranks' residuals owe what the old ones owed: their mean stays") {
  const StoppedRun temp(with(base(4), {"compress.name=topk"}), 19);
  const CheckpointStore store(temp.at("run/checkpoints"));
  const Prepared now(with(base(3), {"compress.name=topk", "resume.residuals=sum"}));
  const std::int64_t step = store.steps().back();
  std::vector<double> mean(now.arena().size());
  for (int r = 0; r < 4; ++r) {
    RunState one;
    read_rank(now.model->store, SafetensorsFile::read(store.path(step) + "/" + rank_file(r)), one);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += one.residual[i] / 4.0;
  }
  std::vector<RunState> states(3);
  run_ranks("threads", 3, [&](Communicator& communicator) {
    states[communicator.rank()] =
        read_checkpoint(store, communicator, now.loaded.config, data_fingerprint(now.data))
            .state(now.model->store);
  });
  for (const RunState& state : states) {
    CHECK(state.exchange.empty());
    double worst = 0, greatest = 0;
    for (std::size_t i = 0; i < mean.size(); ++i) {
      worst = std::max(worst, std::fabs(state.residual[i] - mean[i]));
      greatest = std::max(greatest, std::fabs(mean[i]));
    }
    CHECK(worst <= 1e-6 * greatest);
    CHECK(greatest > 0);
  }
  // Residuals of shards of unequal size do not count alike.
  const TempFolder other;
  const Keys uneven = {"compress.name=topk", "data.shard=uneven:3"};
  start(other, with(base(4), with(uneven, {"train.stop_after=5"})), false);
  CHECK(says(start_error(other, with(base(2), with(uneven, {"resume.residuals=sum"}))),
             {"resume.residuals: sum does not go with data.shard uneven"}));
}

TEST_CASE("keys that decide what a run computes may not change; others may") {
  const Keys keys = with(base(), {"compress.name=topk"});
  const StoppedRun temp(keys, 5);
  CHECK(says(start_error(temp, with(keys, {"optimizer.lr=0.5", "seed=7"})),
             {"optimizer.lr: 0.5, was 0.02", "seed: 7, was 1"}));
  const RunOutcome outcome = start(temp, with(keys, {"train.log_every=7", "data.workers=0"}), true);
  CHECK(outcome.parameter_checksum == whole(keys).checksum);
  const LoadedConfig effective = load_config(temp.at("run/config.yaml"), {});
  CHECK(effective.config.train.log_every == 7);
  CHECK(effective.config.data.workers == 0);
}

TEST_CASE("a damaged checkpoint is passed over for the one before, whichever file it is") {
  const Keys keys = with(base(2), {"compress.name=topk", "train.checkpoint_every=0.25"});
  const StoppedRun made(keys, 40);
  const std::string expected = whole(keys).checksum;
  for (const char* file :
       {"model.safetensors", "optimizer.safetensors", "rank-0001.safetensors", "manifest.json"}) {
    INFO(file);
    const RunCopy temp(made);
    const auto steps = saved_steps(temp);
    REQUIRE(steps.size() >= 2);
    const std::string path = CheckpointStore(temp.at("run/checkpoints")).path(steps.back()) + "/" + file;
    flip_byte(path, fs::file_size(path) / 2);
    CHECK(start(temp, keys, true).parameter_checksum == expected);
    CHECK(metrics_of(temp).steps.size() == 40);
  }
}

TEST_CASE("a newer checkpoint that was passed over is set aside for later starts") {
  const Keys keys = with(base(2), {"compress.name=topk", "train.checkpoint_every=0.25"});
  const StoppedRun temp(keys, 39);
  const CheckpointStore store(temp.at("run/checkpoints"));
  const std::string newest = store.path(39);
  const auto steps = saved_steps(temp);
  REQUIRE((steps.size() >= 2 && steps.back() == 39));
  const std::string hidden = newest + "/rank-0001.safetensors";
  fs::rename(hidden, temp.at("rank"));
  start(temp, with(keys, {"train.stop_after=1"}), true);
  CHECK(saved_steps(temp).back() == steps[steps.size() - 2] + 1);
  CHECK_FALSE(fs::exists(newest));
  CHECK(fs::exists(newest + ".passed-over/manifest.json"));
  fs::rename(temp.at("rank"), newest + ".passed-over/rank-0001.safetensors");
  CHECK(start(temp, keys, true).parameter_checksum == whole(keys).checksum);
  CHECK(metrics_of(temp).steps.size() == 40);
  CHECK(fs::exists(newest + ".passed-over/manifest.json"));  // it is the user's to delete
}

TEST_CASE("a checkpoint with a value that is not finite is refused by tensor, and nothing is changed") {
  const Keys keys = with(base(2), {"compress.name=topk"});
  const StoppedRun made(keys, 19);
  for (const auto& [file, tensor] : std::vector<std::pair<std::string, std::string>>{
           {"model.safetensors", "hidden1.bias"},
           {"optimizer.safetensors", "0.hidden1.bias"},
           {"rank-0000.safetensors", "residual.hidden1.weight"}}) {
    const RunCopy temp(made);
    const std::string metrics = text_of(temp.at("run/metrics.jsonl"));
    set_value(CheckpointStore(temp.at("run/checkpoints")), file, tensor, 3,
              std::numeric_limits<float>::infinity());
    CHECK(says(start_error(temp, keys), {("step-000000019/" + file).c_str(), ("\"" + tensor + "\"").c_str(),
                                         "values is NaN or infinite, the first at index 3"}));
    CHECK(text_of(temp.at("run/metrics.jsonl")) == metrics);
  }
}

TEST_CASE("a rank whose own weights are not finite between syncs goes on as without a stop") {
  for (const Keys& local :
       {Keys{"exchange.every=7"}, {"exchange.every=8", "exchange.fragments=2", "exchange.overlap_steps=3"}}) {
    const Keys keys = with(base(2), with(local, {"compress.name=topk", "compress.warmup=[]"}));
    const StoppedRun temp(keys, 4);
    const CheckpointStore store(temp.at("run/checkpoints"));
    // With a sync under way also the change that is sent.
    for (const char* tensor : {"inner.0.hidden1.weight", local.size() > 1 ? "inner.2.hidden1.weight" : ""})
      if (*tensor) set_value(store, rank_file(1), tensor, 3, std::numeric_limits<float>::infinity());
    const RunOutcome outcome = start(temp, keys, true);
    CHECK(std::isfinite(outcome.test_loss));
    std::int64_t last_skipped = 0;
    for (const StepRecord& step : metrics_of(temp).steps)
      if (step.skipped) last_skipped = step.step;
    CHECK(last_skipped == (local.size() > 1 ? 11 : 7));  // a sync in which rank 1's change does not count
    set_value(store, kModelFile, "hidden1.weight", 3, std::numeric_limits<float>::infinity());
    CHECK(says(start_error(temp, keys), {"model.safetensors", "the run had diverged by then"}));
  }
}

TEST_CASE("a checkpoint whose ranks of a host made steps of their own is refused") {
  const StoppedRun temp(with(base(), {"exchange.every=8", "exchange.ranks_per_host=2"}), 3);
  set_value(CheckpointStore(temp.at("run/checkpoints")), rank_file(1), "inner.0.hidden1.weight", 3, 7);
  CHECK(says(start_error(temp, {}), {"exchange.ranks_per_host", "steps of their own"}));
}

TEST_CASE("a run whose metrics.jsonl is gone, shorter or damaged goes on with the same bits") {
  const Keys keys = with(base(2), {"compress.name=topk"});
  const TempFolder undisturbed;
  const std::string expected = start(undisturbed, keys, false).parameter_checksum;
  const Metrics all = metrics_of(undisturbed);
  const StoppedRun made(keys, 19);
  for (const std::string what : {"gone", "shorter", "damaged"}) {
    INFO(what);
    const RunCopy temp(made);
    const std::string metrics = temp.at("run/metrics.jsonl");
    if (what == "gone") fs::remove(metrics);
    if (what == "shorter") fs::resize_file(metrics, 700);
    if (what == "damaged") flip_byte(metrics, 0);
    CHECK(start(temp, keys, true).parameter_checksum == expected);
    const Metrics made_since = read_metrics(metrics);
    REQUIRE(made_since.steps.size() >= 21);
    CHECK(made_since.steps[made_since.steps.size() - 21].step == 20);
    CHECK(made_since.steps.back().step == 40);
    REQUIRE(made_since.end);
    CHECK(made_since.end->bytes_sent == all.end->bytes_sent);
    CHECK(made_since.end->bytes_dense == all.end->bytes_dense);
    CHECK(made_since.steps.back().time_s >
          CheckpointStore(made.at("run/checkpoints")).manifest(19).totals.train_seconds);
    CHECK(fs::exists(metrics + ".damaged") == (what == "damaged"));
  }
}

TEST_CASE("a run goes on with the threads that it had, unless train.threads says others") {
  const Keys keys = with(base(2), {"train.threads=0"});
  const TempFolder made;
  start(made, with(keys, {"train.threads=1", "train.stop_after=19"}), false);
  const auto resumed = [&](const std::vector<int>& before, const Keys& more) {
    const RunCopy temp(made);
    const CheckpointStore store(temp.at("run/checkpoints"));
    Manifest manifest = store.manifest(19);
    CHECK(manifest.threads == std::vector<int>{1, 1});
    manifest.threads = before;
    std::ofstream(store.path(19) + "/manifest.json") << manifest_text(manifest);
    start(temp, with(keys, more), true);
    return store.manifest(40).threads;
  };
  CHECK(resumed({3, 2}, {}) == std::vector<int>{3, 2});
  CHECK(resumed({}, {}) ==
        std::vector<int>{1, 1});  // of an earlier version, which gave each of several ranks one
  CHECK(resumed({3, 2}, {"train.threads=2"}) == std::vector<int>{2, 2});
}

TEST_CASE("a run without a readable checkpoint says so, and one that cannot save goes on and then fails") {
  const TempFolder temp, other;
  start(temp, with(base(2), {"train.checkpoint_keep=0", "train.stop_after=3"}), false);
  CHECK_FALSE(fs::exists(temp.at("run/checkpoints")));
  CHECK(says(start_error(temp, base(2)), {"checkpoints", "no complete checkpoint"}));
  const LoadedConfig loaded = small_run(other, base(2));
  const RunDirectory folder = create_run_directory(loaded, {});
  std::ofstream(folder.checkpoints()) << "not a directory";
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, folder, true, std::chrono::steady_clock::now()};
  CHECK(says(error_text([&] { run_ranks("threads", 2, [&](Communicator& c) { run_rank(inputs, c); }); }),
             {"the last checkpoint could not be written"}));
  CHECK(read_metrics(folder.metrics_jsonl()).end);
}

TEST_CASE("a run does not go on with another text: checksums are named, resume.data=accept overrides") {
  const MadeUpText text(40);
  const Keys keys = text_keys(text.root());
  const TempFolder temp;
  const std::string run = stopped_with(temp, keys);
  const Manifest manifest = CheckpointStore(run + "/checkpoints").manifest(3);
  const std::string vocabulary = "the checksum of the vocabulary or the classes' names";
  const std::string then = manifest.data.at(vocabulary);
  reverse_line(text.root(), 0);
  const DataFingerprint now = data_fingerprint(load_data(small_run(temp, keys).config));
  REQUIRE(now.at(vocabulary) != then);
  const auto resume = [&] { start(temp, with(keys, {"train.stop_after=1"}), true); };
  CHECK(says(error_text(resume),
             {vocabulary.c_str(), now.at(vocabulary).c_str(), then.c_str(), "resume.data=accept"}));
  CHECK_USER_ERROR(
      check_resumable(CheckpointStore(run + "/checkpoints"), load_resumed_config(run, keys).config, now),
      then);
  start(temp, with(keys, {"train.stop_after=1", "resume.data=accept"}), true);
  CHECK(text_of(run + "/config.yaml").find("accept") == std::string::npos);
  resume();  // the new checkpoint is of these data
  reverse_line(text.root(), 30);
  CHECK(says(error_text(resume), {"the checksum of training samples: ", ", was "}));

  // Data that lie in another folder are the same data.
  const TempFolder other, moved;
  stopped_with(other, keys);
  fs::copy(text.root(), moved.str(), fs::copy_options::recursive);
  check_same(whole(keys), ended(other, start(other, with(keys, {"data.root=" + moved.str()}), true)));
}

TEST_CASE("the sizes of all files count, also of those whose content is not read") {
  const TempFolder folder;
  for (const char* split : {"train", "val"})
    for (const char* name : {"a", "b"})
      for (int i = 0; i < 600; ++i)
        folder.write(std::string(split) + "/" + name + "/" + std::to_string(10000 + i) + ".ppm", {1, 2});
  DatasetOptions options;
  options.root = folder.str();
  const auto sum = [&] { return data_checksum(*make_dataset("image_folder", options, Split::train)); };
  const std::uint64_t before = sum();
  folder.write("train/a/10001.ppm", {1, 3});  // of 1200 files every fourth is read
  CHECK(sum() == before);
  folder.write("train/a/10001.ppm", {1, 2, 3});
  CHECK(sum() != before);
}

TEST_CASE("a checkpoint that does not say of which data goes on") {
  const TempFolder temp;
  const Keys keys = {"train.max_steps=6"};
  const std::string run = stopped_with(temp, keys);
  const std::string path = CheckpointStore(run + "/checkpoints").path(3) + "/manifest.json";
  nlohmann::ordered_json body = nlohmann::ordered_json::parse(text_of(path)).at("manifest");
  REQUIRE(body.erase("data") == 1);
  const std::string text = body.dump();
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(text)));
  std::ofstream(path) << fmt::format(R"({{"checksum":"{:016x}","manifest":{}}})", checksum.value(), text)
                      << "\n";
  const Ended resumed = ended(temp, start(temp, keys, true));
  check_same(whole(keys), resumed);
}
