// What a run on a GPU writes down beside its metrics, and plans that it makes.
#include "tests/train/small_run.h"
#include "train/metrics/npy.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::vector<float> recorded(const std::string& device) {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(
      temp, {"train.device=" + device, "train.deterministic=true", "train.max_steps=3", "data.test_size=8",
             "train.record_gradients=2", "compress.name=topk", "output.dir=" + temp.at("run")});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  run_ranks("threads", 1, [&](Communicator& communicator) { run_rank(inputs, communicator); });
  const NpyReader file(temp.at("run/gradients.npy"));
  std::vector<float> values(file.numel());
  file.read(0, std::span<float>(values));
  return values;
}

}  // namespace

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
