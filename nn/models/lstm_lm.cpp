// LSTM language models: Zaremba, Sutskever, Vinyals, "Recurrent neural network regularization", arXiv
// 1409.2329, with dropout on what goes up (into each layer and into the output) and none from step to step.
// Parameters have the names and biases of PyTorch's word-level language model (two biases per LSTM layer),
// whose first values they have too, unless model.init_uniform is given.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

const Option kInitUniform{
    "init_uniform", 0.0,
    "first values of all parameters are uniform in +- this; 0: those of PyTorch's language model", 0, 10};

class LstmLanguageModel final : public Module {
 public:
  LstmLanguageModel(ParameterStore& store, const ModelOptions& options) : dropout_(options.dropout) {
    const std::int64_t tokens = options.outputs, width = options.get<int>(option::width);
    const double given = options.get<double>(kInitUniform);
    const auto start = [&](float bound) { return uniform(given > 0 ? given : bound); };
    const float of_lstm = 1.0f / std::sqrt(static_cast<float>(width));
    const auto state_size = static_cast<std::size_t>(options.batch * width);
    encoder_ = &store.add("encoder.weight", {tokens, width}, start(0.1f)).mark_outer();
    for (std::int64_t i = 0; i < options.get<int>(option::layers); ++i) {
      const auto add = [&](const char* name, const Shape& shape) {
        return &store.add(fmt::format("rnn.{}_l{}", name, i), shape, start(of_lstm));
      };
      layers_.push_back({add("weight_ih", {4 * width, width}),
                         add("weight_hh", {4 * width, width}),
                         add("bias_ih", {4 * width}),
                         add("bias_hh", {4 * width}),
                         {&store.add_state(fmt::format("rnn.hidden_l{}", i), state_size),
                          &store.add_state(fmt::format("rnn.cell_l{}", i), state_size)}});
    }
    decoder_ = options.get<bool>(option::tied)
                   ? encoder_
                   : &store.add("decoder.weight", {tokens, width}, start(0.1f)).mark_outer();
    decoder_bias_ = &store.add("decoder.bias", {tokens}, start(0.0f));
  }

  bool reads_tokens() const override { return true; }
  Variable forward(const Variable& ids, const ForwardContext& context) override {
    Variable y = embedding(ids, context.use(*encoder_));
    if (y.value().device().kind == DeviceKind::cpu) y = cast(y, context.cpu_activations);
    std::uint32_t index = 0;
    const auto drop = [&](const Variable& x) { return Dropout(dropout_, index++).forward(x, context); };
    for (const Layer& layer : layers_)
      y = lstm(drop(y), ids.shape()[0],
               {context.use(*layer.input), context.use(*layer.recurrent), context.use(*layer.input_bias),
                context.use(*layer.recurrent_bias)},
               layer.state);
    return linear(drop(y), context.use(*decoder_), context.use(*decoder_bias_));
  }

 private:
  struct Layer {
    Parameter *input, *recurrent, *input_bias, *recurrent_bias;
    LstmState state;
  };
  float dropout_;
  std::vector<Layer> layers_;
  Parameter *encoder_, *decoder_, *decoder_bias_;
};

const bool lstm_lm_registered = add_model<LstmLanguageModel>(
    "lstm_lm",
    "LSTM language model: model.layers of model.width units, model.tied embeddings, for data.name=text",
    {option::width, option::layers, option::tied, kInitUniform});

}  // namespace
}  // namespace topknot
