// train --dry-run as a user runs it.

#include "tests/cli/command.h"

using namespace topknot;

TEST_CASE("a dry run shows parameters, groups and bytes, and writes nothing") {
  const TempFolder temp;
  const CommandOutcome dry = train("--dry-run compress.name=topk dist.ranks=4 output.dir=" + temp.at("run"));
  CHECK(dry.ended(0));
  CHECK(says(dry.output, {"269722", "stage3.block1.1.conv.weight", "bytes that a rank sends"}));
  CHECK_FALSE(std::filesystem::exists(temp.at("run")));
}

TEST_CASE("a dry run with auto says what the model would choose over the given links") {
  const std::string small =
      "--dry-run compress.name=auto train.device=cpu model.name=mlp model.hidden=[16] data.train_size=64 "
      "data.test_size=8 dist.ranks=4 ";
  const CommandOutcome one = train(small + "dist.link.rate=10kbit,20gbit@5");
  CHECK(one.ended(0));
  CHECK(says(one.output, {"auto with 4 ranks, 50us a message", "10kbit: takes topk", "20gbit: takes"}));
  CHECK(one.count(": takes ") == 2);
  CHECK(train(small).count(": takes ") == 4);
  CHECK(train(small + "dist.ranks=1").count(": takes ") == 0);
  CHECK(train("--dry-run model.name=mlp compress.name=topk").count(": takes ") == 0);
}

TEST_CASE("a dry run shows how much of the data an epoch uses, and a last step that is shorter") {
  const std::string keys = "--dry-run model.name=mlp dist.ranks=2 data.batch_size=4 data.train_size=509 ";
  CHECK(train(keys + "train.accumulate=50")
            .has("an epoch uses 504 of 509 samples; its last step has 13 of 50 "
                 "batches"));
  CHECK(train(keys + "train.accumulate=9").has("an epoch uses 504 of 509 samples\n"));
}

TEST_CASE("a dry run shows the density warm-up it will have, and what does not go by density") {
  const CommandOutcome falling =
      train("--dry-run compress.name=topk compress.density=0.001 compress.warmup_epochs=2");
  CHECK(says(falling.output, {"epoch 0 at 0.1 ", "epoch 1 at 0.01 ", "epoch 2 on at 0.001 "}));
  const CommandOutcome quantised = train("--dry-run compress.name=terngrad compress.density=0.01");
  CHECK_FALSE(quantised.has("epoch 0"));
  CHECK(quantised.has("warning: compress.density is for methods that select entries"));
  CHECK(train("--dry-run compress.name=topk compress.scope=tensor compress.layer_density=auto")
            .has("measured when the run starts"));
}

TEST_CASE("a dry run shows what the method's name has filled in, and what a given key has in place of it") {
  const CommandOutcome dry =
      train("--dry-run model.name=mlp compress.name=sparseloco exchange.every=30 exchange.outer.lr=0.5");
  CHECK(says(dry.output,
             {"compress.name=sparseloco says:\n", "  compress.density         0.015625 (sparseloco)\n",
              "  exchange.outer.name      sgd (sparseloco)\n",
              "  exchange.outer.lr        0.5 (command line; sparseloco has 1)\n"}));
}

TEST_CASE("a dry run shows memory and operations per rank") {
  const CommandOutcome dry =
      train("--dry-run model.name=mlp model.hidden=[24] data.batch_size=16 compress.name=dgc dist.ranks=4");
  CHECK(dry.ended(0));
  for (const char* line : {"weights                      0.30 MB", "gradients                    0.30 MB",
                           "residuals                    0.30 MB", "optimizer state", "method state",
                           "activations", "of 16 samples", "batches"})
    CHECK(dry.has(line));
  // 16 x 2 x (3072 x 24 + 24 x 10), and back without the gradient of the pictures
  CHECK(dry.has("compute per rank: 0.004742 GFLOP per step, of them forward 0.002367 and backward 0.002375"));
}
