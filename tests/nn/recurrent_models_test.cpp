// The recurrent models: Deep Speech 2 and the LSTM language model.
#include "tests/support/built_model.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

ModelOptions speech_options(std::int64_t frames, std::int64_t width, std::int64_t layers) {
  ModelOptions options;
  options.input = {1, 161, frames};
  options.outputs = 29;
  options.set("width", int(width));
  options.set("layers", int(layers));
  return options;
}

}  // namespace

TEST_CASE("deep_speech for AN4 has the papers' number of parameters") {
  CHECK(parameters_of("deep_speech", speech_options(100, 800, 5)) == 27'569'568);
}

TEST_CASE("deep_speech gives a row per output frame, a recording's the same alone and beside a longer one") {
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
    const auto n = std::int64_t(frames.size());
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
      CHECK(beside[std::size_t(2 * t * 29 + c)] == Approx(alone[std::size_t(t * 29 + c)]).margin(1e-4));
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

namespace {

ModelOptions lm_options(std::int64_t tokens, std::int64_t width, bool tied) {
  ModelOptions options;
  options.input = {4, 1, 1};
  options.outputs = tokens;
  options.set("width", int(width));
  options.set("tied", tied);
  options.batch = 3;
  options.dropout = 0;
  return options;
}

struct BuiltLm : BuiltModel {
  explicit BuiltLm(const ModelOptions& options) : BuiltModel("lstm_lm", options) {}
  // Of 3 sequences of 4 tokens below 11, always the same.
  Variable loss(const ForwardContext& context = {}) {
    std::vector<float> ids;
    std::vector<std::int32_t> next;
    for (int i = 0; i < 12; ++i) ids.push_back(float(i * i % 11)), next.push_back(i * 5 % 11);
    return softmax_cross_entropy(model->forward(Variable(Tensor::from(ids, {3, 4, 1, 1})), context), next);
  }
};

}  // namespace

TEST_CASE("LSTM language models have the published number of parameters, untied and tied") {
  const auto count = [](std::int64_t width, bool tied) {
    return parameters_of("lstm_lm", lm_options(10000, width, tied));
  };
  CHECK(count(1500, false) == 66034000);
  CHECK(count(1500, true) == 51034000);
  CHECK(count(650, false) == 19780400);
  CHECK(count(200, false) == 4653200);
}

TEST_CASE("the gradient of every parameter of the language model is the loss's slope, tied and untied") {
  for (const bool tied : {false, true}) {
    ModelOptions options = lm_options(11, 6, tied);
    options.set("init_uniform", 0.8);
    BuiltLm lm(options);
    const auto loss_value = [&] {
      lm.store.reset_states();
      return double(lm.loss().value().data()[0]);
    };
    backward(lm.loss());
    CHECK(lm.store.arena().zero_unwritten_gradients().empty());
    for (Parameter* const& p : lm.store.arena().parameters()) {
      INFO(p->name() << (tied ? ", tied" : ""));
      check_slope({&p, 1}, loss_value, 0.01);
    }
  }
}

TEST_CASE("the language model carries its state from batch to batch until it is reset") {
  BuiltLm lm(lm_options(11, 6, false));
  const float first = lm.loss().value().data()[0], second = lm.loss().value().data()[0];
  CHECK(first != second);
  lm.store.reset_states();
  CHECK(lm.loss().value().data()[0] == first);
  CHECK(lm.loss(evaluation()).value().data()[0] == second);  // an evaluation goes on from the state too
}

TEST_CASE("dropout of the language model is on the embedding and each layer's output, not in evaluation") {
  ModelOptions options = lm_options(11, 6, false);
  options.dropout = 0.5f;
  BuiltLm lm(options), without(lm_options(11, 6, false));
  ForwardContext one, other;
  one.step = 1, other.step = 2;
  const auto loss = [&](BuiltLm& of, const ForwardContext& context) {
    of.store.reset_states();
    return of.loss(context).value().data()[0];
  };
  CHECK(loss(lm, one) != loss(lm, other));
  CHECK(loss(lm, one) == loss(lm, one));
  CHECK(loss(lm, evaluation()) == loss(without, one));
}

TEST_CASE("the language model begins as PyTorch's does, or uniform as model.init_uniform says") {
  const auto greatest = [](const BuiltLm& lm, const char* name) {
    const Parameter& p = lm.parameter(name);
    float most = 0;
    for (std::size_t i = 0; i < p.numel(); ++i) most = std::max(most, std::abs(p.value()[i]));
    return most;
  };
  ModelOptions options = lm_options(50, 25, false);
  BuiltLm own(options);
  CHECK(greatest(own, "encoder.weight") == Approx(0.1).epsilon(0.02));
  CHECK(greatest(own, "rnn.weight_hh_l1") == Approx(0.2).epsilon(0.02));
  CHECK(greatest(own, "decoder.bias") == 0.0f);
  options.set("init_uniform", 0.05);
  BuiltLm given(options);
  for (const char* name :
       {"encoder.weight", "rnn.weight_ih_l0", "rnn.bias_hh_l1", "decoder.weight", "decoder.bias"})
    CHECK(greatest(given, name) == Approx(0.05).epsilon(0.1));
}
