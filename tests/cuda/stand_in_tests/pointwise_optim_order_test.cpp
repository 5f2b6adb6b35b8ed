// SGD and clipping do not lean on the order of blocks and threads.
#include "nn/core/rng.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

TEST_CASE("a clipped SGD step gives the same whatever the order of blocks and threads") {
  std::vector<std::vector<float>> weights;
  std::vector<double> scales;
  for (const bool reverse : {false, true}) {
    stand_in::reset();
    stand_in::machine().reverse = reverse;
    const OnGpu gpu;
    ParameterStore store(gpu.device());
    const auto normal = [](std::span<float> v, const CounterRng& rng) {
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = rng.normal(i);
    };
    store.add("weight", {130, 170}, normal);
    store.add("bias", {170}, normal);
    ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
    OptimizerOptions options;
    options.momentum = 0.9, options.weight_decay = 0.1;
    const auto optimizer = make_optimizer(options, arena);
    std::vector<float> gradient(arena.size());
    normal(gradient, CounterRng(1, RngUse::test));
    const DeviceVector<float> there(gradient);
    DeviceVector<StepParameters> parameters(std::vector<StepParameters>(1));
    Clip clip(gpu.device(), arena.size());
    clip.sum_of_squares({there.data(), there.size()}, false);
    clip.set_gradient_scale(1.0, parameters.data());
    optimizer->update(0, {there.data(), there.size()}, StepState{parameters.data()});
    weights.push_back(arena.host_weights());
    scales.push_back(parameters.host()[0].gradient_scale);
  }
  stand_in::reset();
  CHECK(same_bits(weights[0], weights[1]));
  CHECK(same_bits(scales, {scales[0], scales[0]}));
  CHECK(scales[0] < 1);
}

}  // namespace
}  // namespace topknot
