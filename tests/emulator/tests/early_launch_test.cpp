// Kernels that are launched to begin early: on which GPUs, and where the driver refuses it.
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/standard_error.h"
#include "tests/train/small_run.h"

namespace topknot {
namespace {

using namespace topknot::testing;

struct EarlyRun {
  std::vector<std::string> weights;
  std::size_t kernels = 0, early = 0;
  std::string log;
};

EarlyRun early_run(const Keys& keys, int major = 9, const char* refused = nullptr, int code = 90) {
  const emulator::Settings settings;
  emulator::machine().major = major;
  emulator::machine().code = code;
  if (refused) emulator::fail(refused, cudaErrorInvalidResourceHandle);
  const StandardError written;
  const Run run =
      train("threads", 1,
            with({"train.device=cuda", "train.deterministic=true", "train.max_steps=6", "data.train_size=32",
                  "data.test_size=8", "data.image_size=12", "model.hidden=[12]", "compress.name=topk"},
                 keys));
  return {run.checksums, emulator::counts().kernels, emulator::counts().early_kernels, written.text()};
}

TEST_CASE("early launches: most kernels of a run, by its key, from compute capability 9.0 on") {
  const EarlyRun plain = early_run({});
  CHECK(plain.kernels > 0);
  CHECK(plain.early == 0);
  for (const char* graphs : {"train.graphs=true", "train.graphs=false"}) {
    const EarlyRun early = early_run({"train.unproven=early_launch", graphs});
    CHECK(early.early > early.kernels * 3 / 4);
    CHECK(early.early < early.kernels);  // but for those with restricted pointers
    CHECK(early.weights == plain.weights);
  }
  // An older GPU, or kernels compiled for one, which do not wait.
  for (const auto& [major, code] : {std::pair{8, 80}, std::pair{9, 80}}) {
    const EarlyRun older = early_run({"train.unproven=early_launch"}, major, nullptr, code);
    CHECK(older.early == 0);
    CHECK_FALSE(says(older.log, {"early_launch"}));
    CHECK(older.weights == plain.weights);
  }
}

TEST_CASE("early launches: a run whose driver refuses them in a graph says so and goes on without") {
  const EarlyRun plain = early_run({});
  const EarlyRun refused = early_run({"train.unproven=early_launch"}, 9, "an early launch in a graph");
  CHECK(says(refused.log, {"train.unproven=early_launch", "cudaErrorInvalidResourceHandle", "rank 0"}));
  CHECK(refused.early < refused.kernels / 2);  // the trial's
  CHECK(refused.weights == plain.weights);
}

}  // namespace
}  // namespace topknot
