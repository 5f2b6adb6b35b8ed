#include "train/start.h"

#include "nn/layers/layers.h"
#include "nn/models/model.h"
#include "tests/support/error_text.h"
#include "tests/train/small_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

int initialised = 0;

// Counts the tensors that are given a value.
const RegisterModel initialised_model(
    "test_initialised", "of the tests", [](ParameterStore& store, const ModelOptions& options) -> ModulePtr {
      const auto count = [](std::span<float>, const CounterRng&) { ++initialised; };
      auto model = std::make_unique<Sequential>();
      model->add<Flatten>();
      model->add<Linear>(store, "output", options.input.numel(), options.outputs);
      store.add("a", {8, 8}, count);
      store.add("b", {8}, count);
      return model;
    });

}  // namespace

TEST_CASE("a rank's memory counts the moments of its optimizer") {
  const TempFolder temp;
  const auto buffers = [&](const Keys& keys) {
    const LoadedConfig loaded = small_run(temp, keys);
    const RunData data = load_data(loaded.config);
    const double parameters =
        static_cast<double>(build_model(loaded.config, *data.train)->store.arena().size());
    return model_bytes(loaded.config, *data.train) / (4 * parameters);
  };
  CHECK(buffers({"optimizer.momentum=0"}) == 3);
  CHECK(buffers({"optimizer.momentum=0.9"}) == 4);
  CHECK(buffers({"optimizer.name=adamw"}) == 5);
}

TEST_CASE("a model that no machine holds is counted and refused without memory for it") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"model.hidden=[1000000,1000000]"});
  const RunData data = load_data(loaded.config);
  CHECK(model_bytes(loaded.config, *data.train) > 16e12);
  const RunCheck check = check_run(loaded.config, data);
  REQUIRE(check.problems.size() == 1);
  CHECK(says(check.problems[0].message, {"out of memory: the weights", "TB)"}));
}

TEST_CASE("the checks before a run give no weight a value") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"model.name=test_initialised"});
  const RunData data = load_data(loaded.config);
  CHECK(check_run(loaded.config, data).problems.empty());
  check_limits(loaded.config, data, 1, 1);
  CHECK(initialised == 0);
  build_model(loaded.config, *data.train);
  CHECK(initialised == 2);
}

TEST_CASE("more ranks than a machine can hold are refused with the key to lower") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {});
  const RunData data = load_data(loaded.config);
  check_limits(loaded.config, data, 2, 1);
  CHECK(user_error([&] { check_limits(loaded.config, data, 1 << 30, 1); },
                   {"dist.ranks", "this machine", "lower"}));
}
