#include "nn/models/model.h"
#include "tests/support/user_error.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

ModelOptions speech_options(std::int64_t frames, std::int64_t width, std::int64_t layers) {
  ModelOptions options;
  options.input = {1, 161, frames};
  options.outputs = 29;
  options.width = width;
  options.layers = layers;
  return options;
}

}  // namespace

TEST_CASE("deep_speech for AN4 has the papers' number of parameters") {
  ParameterStore store;
  make_model("deep_speech", store, speech_options(100, 800, 5));
  std::size_t count = 0;
  for (const auto& parameter : store.parameters()) count += parameter->numel();
  CHECK(count == 27'569'568);
}

TEST_CASE(
    "deep_speech gives a row per output frame, and what lies behind a recording reaches its last frames "
    "alone") {
  ParameterStore store;
  const ModulePtr model = make_model("deep_speech", store, speech_options(100, 10, 2));
  store.build([](const Parameter&) { return true; }, 1);
  CHECK(model->output_frames(1) == 1);
  CHECK(model->output_frames(100) == 50);
  CHECK(model->output_frames(101) == 51);
  ForwardContext evaluation;
  evaluation.training = false;
  const auto rows = [&](const std::vector<float>& x, std::int64_t n, std::int64_t frames) {
    const Variable y = model->forward(Variable(Tensor::from(x, {n, 1, 161, frames})), evaluation);
    REQUIRE(y.shape() == Shape({n * model->output_frames(frames), 29}));
    return values_of(y);
  };
  // A batch of one, and of two with another recording and frames behind both.
  const auto x = random_values(161 * 60, 1), other = random_values(161 * 90, 2);
  std::vector<float> both(2 * 161 * 90);
  for (std::size_t k = 0; k < 161; ++k) std::copy_n(&x[k * 60], 60, &both[k * 90]);
  std::copy(other.begin(), other.end(), both.begin() + 161 * 90);
  const auto alone = rows(x, 1, 60), beside = rows(both, 2, 90);
  // The lookahead and the second convolution see 20 + 5 output frames on, the first 5 input frames: zeros behind the end, as
  // in a batch of its own, only before these.
  const std::int64_t same = model->output_frames(60) - 28;
  REQUIRE(same > 0);
  for (std::int64_t t = 0; t < same; ++t)
    for (std::int64_t c = 0; c < 29; ++c)
      CHECK(beside[static_cast<std::size_t>(2 * t * 29 + c)] ==
            Approx(alone[static_cast<std::size_t>(t * 29 + c)]).margin(1e-4));
}

TEST_CASE("deep_speech takes spectrograms only") {
  ParameterStore store;
  ModelOptions options = speech_options(100, 10, 2);
  options.input = {3, 32, 32};
  CHECK(user_error([&] { make_model("deep_speech", store, options); }, {"model.name", "spectrograms"}));
}
