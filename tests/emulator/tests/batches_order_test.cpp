// How far the host goes on while the GPU is at earlier steps.
#include <fmt/format.h>

#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/train/small_run.h"
#include "train/cuda/batches.h"
#include "train/setup.h"

namespace topknot {
namespace {

using namespace topknot::testing;

TEST_CASE("a data set lies on the GPU where the ranks of this GPU have room for it, not those of all") {
  const emulator::Settings settings;
  OnGpu gpu;
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"data.on_device=auto", "data.train_size=64", "dist.ranks=16"});
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  const std::size_t set =
      64 * std::size_t(data.train->sample_shape().numel()) * (data.train->bytes(0) ? 1 : 4);
  emulator::machine().memory = 12 * set + (emulator::counts().bytes_in_use << 2);
  const auto taken = [&](int neighbours) {
    const std::size_t before = emulator::counts().bytes_in_use;
    const auto batches =
        cuda::make_device_batches(loaded.config, *data.train, *model->module, true, 0, 16, neighbours);
    return emulator::counts().bytes_in_use - before;
  };
  CHECK(taken(1) >= set);
  CHECK(taken(16) < set);
}

TEST_CASE("however many batches make a step, the host brings them while the GPU is at the step before") {
  constexpr int parts = 20;
  for (const char* where : {"data.on_device=true", "data.on_device=false"}) {
    const emulator::Settings settings;
    OnGpu gpu;
    const TempFolder temp;
    const LoadedConfig loaded = small_run(
        temp, {where, "data.batch_size=2", "data.train_size=200", fmt::format("train.accumulate={}", parts)});
    const RunData data = load_data(loaded.config);
    const auto model = build_model(loaded.config, *data.train);
    const auto batches = cuda::make_device_batches(loaded.config, *data.train, *model->module, true, 0, 1, 1);
    batches->start_epoch(0);
    const auto bring = [&] { batches->begin_step(parts); };
    bring();
    bool ended = false, waited = false;  // the step before; whether the host waited for it
    const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    emulator::enqueue_when(gpu.stream(), [&] {
      waited = waited || (!ended && std::chrono::steady_clock::now() > latest);
      return ended || waited;
    });
    bring();
    ended = true;
    gpu.context().synchronize();
    INFO(where);
    CHECK(!waited);
  }
}

}  // namespace
}  // namespace topknot
