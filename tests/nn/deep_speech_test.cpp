#include "tests/support/built_model.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

ModelOptions speech_options(std::int64_t frames, std::int64_t width, std::int64_t layers) {
  ModelOptions options;
  options.input = {1, 161, frames};
  options.outputs = 29;
  options.set("width", static_cast<int>(width));
  options.set("layers", static_cast<int>(layers));
  return options;
}

}  // namespace

TEST_CASE("deep_speech for AN4 has the papers' number of parameters") {
  CHECK(parameters_of("deep_speech", speech_options(100, 800, 5)) == 27'569'568);
}

TEST_CASE(
    "deep_speech gives a row per output frame, the same for a recording alone and beside a longer one") {
  const BuiltModel built("deep_speech", speech_options(100, 10, 2));
  const auto& [store, model] = built;
  for (const auto& parameter : store.parameters())  // so that zeros do not stay zeros
    if (parameter->shape().rank() == 1)
      for (std::size_t i = 0; i < parameter->numel(); ++i) parameter->value()[i] += 0.5f;
  CHECK(model->output_frames(1) == 1);
  CHECK(model->output_frames(100) == 50);
  CHECK(model->output_frames(101) == 51);
  const auto rows = [&](const std::vector<float>& x, const std::vector<std::int32_t>& frames,
                        std::int64_t longest) {
    const auto n = static_cast<std::int64_t>(frames.size());
    ForwardContext context = evaluation();
    context.frames = frames;
    const Variable y = model->forward(Variable(Tensor::from(x, {n, 1, 161, longest})), context);
    REQUIRE(y.shape() == Shape({n * model->output_frames(longest), 29}));
    return values_of(y);
  };
  const auto x = random_values(161 * 60, 1), other = random_values(161 * 90, 2);
  std::vector<float> both(2 * 161 * 90);
  for (std::size_t k = 0; k < 161; ++k) std::copy_n(&x[k * 60], 60, &both[k * 90]);
  std::copy(other.begin(), other.end(), both.begin() + 161 * 90);
  const auto alone = rows(x, {30}, 60), beside = rows(both, {30, 45}, 90);
  for (std::int64_t t = 0; t < 30; ++t)
    for (std::int64_t c = 0; c < 29; ++c)
      CHECK(beside[static_cast<std::size_t>(2 * t * 29 + c)] ==
            Approx(alone[static_cast<std::size_t>(t * 29 + c)]).margin(1e-4));
}

TEST_CASE("deep_speech trains with zeros for padding in batch norm's statistics") {
  const BuiltModel built("deep_speech", speech_options(90, 10, 1));
  const auto& [store, model] = built;
  // Convolutions that give 1 everywhere.
  for (const auto& parameter : store.parameters())
    if (parameter->name().starts_with("conv.") && parameter->name().find(".bn.") == std::string::npos)
      std::fill_n(parameter->value(), parameter->numel(), parameter->name().ends_with(".bias") ? 1.0f : 0.0f);
  const std::vector<std::int32_t> frames{30, 45};
  ForwardContext training;
  training.frames = frames;
  model->forward(Variable(Tensor::zeros({2, 1, 161, 90})), training);
  int means = 0;
  for (const auto& buffer : store.buffers()) {
    if (!buffer->name.starts_with("conv.") || !buffer->name.ends_with("mean")) continue;
    ++means;
    for (const float mean : buffer->values) CHECK(mean == Approx(0.1 * 75 / 90));  // from 0, by a tenth
  }
  CHECK(means == 2);
}

TEST_CASE("deep_speech takes spectrograms only") {
  ModelOptions options = speech_options(100, 10, 2);
  options.input = {3, 32, 32};
  CHECK(user_error([&] { BuiltModel("deep_speech", options); }, {"model.name", "spectrograms"}));
}
