// Runs with train.precision=bf16 on a CPU: activations in bfloat16, everything that is exchanged and kept in fp32.
#include "tests/data/made_up_speech.h"
#include "tests/support/bfloat16.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

Keys bf16_keys(const Keys& keys) {
  return with({"train.precision=bf16", "train.device=cpu", "train.threads=1", "train.stop_after=0"}, keys);
}

}  // namespace

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

TEST_CASE(
    "bfloat16 on a CPU: language models and speech, by threads and by gloo, from a checkpoint, with a loss "
    "near fp32's") {
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
  for (const Keys& keys : {of_text, of_speech}) {
    INFO(keys.front());
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
